"""A client's report knows its own namespace, and tells nothing of any other."""

from __future__ import annotations

import random

from sgl_importance.misses.account import AccountedRequest, account_of
from sgl_importance.misses.miss_documents import client_document, operator_document
from sgl_importance.misses.path_memory import Namespace, PathMemory
from sgl_importance.misses.path_tree import packed
from sgl_importance.misses.reason import Fate, NeededBy, PathVisit, Reason, Room
from sgl_importance.tiers import Tier

CLIENT, OTHERS = (None, "client"), ((None, None), (None, "other"), ("adapter", None))
PAGE = 2
NOTHING = {Tier.DEVICE: 0}


def memory() -> PathMemory:
    return PathMemory(PAGE, gone_pages=10**6, max_marks=10**6)


def live(shared: PathMemory, own: PathMemory, chance: random.Random, clock: int) -> None:
    """Something happens in a namespace; ``own`` hears of the client's only."""
    namespace = chance.choice((CLIENT, *OTHERS))
    path = packed([chance.randint(0, 1) for _ in range(PAGE * chance.randint(1, 4))])
    visit = PathVisit(f"{namespace}", clock, float(clock))
    room = Room(NeededBy.PREFILL, "other request")
    fate = Fate(Reason.EVICTED, clock, float(clock), None, Tier.DEVICE, room, 0.5)
    is_kept = chance.random() < 0.5
    for each in (shared, own) if namespace == CLIENT else (shared,):
        end = each.holds(None, namespace, path, visit)
        if not is_kept and not end.children:
            each.cut(end, PAGE)
            each.gone(end, PAGE, fate)


def told(memory: PathMemory, namespace: Namespace, prompt: bytes) -> AccountedRequest:
    account = account_of(memory, namespace, prompt, memory.path(namespace, prompt), NOTHING)
    return AccountedRequest(PathVisit("r", 999, 999.0), namespace, account)


def test_a_client_is_told_the_same_whatever_other_namespaces_hold():
    chance = random.Random(5)
    differing = 0
    for _ in range(60):
        shared, own = memory(), memory()
        for clock in range(12):
            live(shared, own, chance, clock)
        prompt = packed([chance.randint(0, 1) for _ in range(9)])
        with_others, alone = told(shared, CLIENT, prompt), told(own, CLIENT, prompt)
        assert client_document(with_others) == client_document(alone)
        assert "other" not in str(client_document(with_others))
        assert sum(client_document(with_others)["missed_tokens"].values()) == 9
        differing += operator_document(with_others) != operator_document(alone)
    assert differing > 10, "the operator is told of the others"


def test_a_client_does_not_see_the_request_that_it_parted_from():
    paths = memory()
    paths.holds(None, CLIENT, packed([1, 2, 3, 4, 5, 6]), PathVisit("neighbour", 1, 1.0))
    request = told(paths, CLIENT, packed([1, 2, 3, 9, 9, 9, 9]))
    assert client_document(request)["parted"] == {"token": 3, "seconds_ago": 998.0}
    operator = operator_document(request)["parted"]
    assert (operator["rid"], operator["before_ids"]) == ("neighbour", [1, 2, 3])
    assert (operator["asked_ids"], operator["known_ids"]) == ([9, 9, 9, 9], [4, 5, 6])
