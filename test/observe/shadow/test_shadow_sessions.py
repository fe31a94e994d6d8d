"""Sessions that say they are over: the shadow of importance finds what the real tree finds."""

from __future__ import annotations

import random

import pytest

from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance.nodes.named_sessions import SessionName
from sgl_importance.observe.shadow.shadow_cache import ShadowCache
from sgl_importance.observe.shadow.shadow_pair import ShadowPair
from sgl_importance.observe.shadow.shadow_ranking import ImportanceRanking
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance.reuse.answer_end import AnswerEnd
from sglang_importance.operations.handlers import OPERATIONS

from support.drivers.hinted_requests import envelope
from support.drivers.shadowed_tree import settle, shadowed
from support.drivers.tree_driver import PAGE, TreeDriver
from support.drivers.tree_requests import prompt
from support.workloads.recordings import COST

POOL = 40
SESSIONS = 6


def close(driver: TreeDriver, session: str) -> None:
    arguments = {"session_id": session, "extra_key": None, "cache_salt": None, "at_once": False}
    OPERATIONS["close_session"](driver.cache, arguments)


class Both:
    """The same requests, one at a time, through sglang's own tree and through a shadow of its size."""

    def __init__(self, *, tells_shadow: bool = True) -> None:
        policy = ImportancePolicy(CostModel(**COST), use_importance=False)
        self.driver = TreeDriver(tokens=POOL * PAGE, policy=policy)
        ghosts = self.driver.component.state.tree.tracker.ghosts.capacity_pages
        self.shadow = ShadowCache(POOL, PAGE, ImportanceRanking(CostModel(**COST), PAGE, ghosts))
        self.tells_shadow = tells_shadow
        self.found: list[tuple[int, int]] = []

    def ask(self, session: str | None, tokens: list[int], answer: list[int]) -> None:
        request = self.driver.admit(tokens)
        request.session_id, request.kv_hints = session, envelope(answer_end="tool_call")
        self.driver.prefill(request)
        name = None if session is None else SessionName(session)
        shadow = self.shadow.admit(request.rid, self.pages(tokens), len(tokens), name)
        assert shadow is not None
        self.found.append((request.prefix_len, shadow))
        self.driver.decode(request, answer)
        self.driver.finish(request)
        everything = [*tokens, *answer]
        self.shadow.finish(request.rid, self.pages(everything), len(everything), AnswerEnd.TOOL_CALL)
        self.shadow.check_integrity()

    def close(self, session: str) -> None:
        close(self.driver, session)
        if self.tells_shadow:
            self.shadow.session_over(SessionName(session))

    @staticmethod
    def pages(tokens: list[int]) -> list[bytes]:
        return chain_digests(root_digest(None, None), tokens, PAGE)


def live(both: Both, seed: int) -> None:
    """Sessions that share a beginning grow turn by turn, and each that has grown enough is closed."""
    chance = random.Random(seed)
    texts: dict[str, list[int]] = {}
    for turn in range(150):
        session = f"s{chance.randrange(SESSIONS)}"
        text = texts.setdefault(session, prompt(0, 2))
        text += [1000 * turn + place for place in range(chance.randrange(1, 5 * PAGE))]
        answer = [1000 * turn + 500 + place for place in range(chance.randrange(1, PAGE))]
        both.ask(None if chance.random() < 0.1 else session, text, answer)
        text += answer
        if len(text) > 12 * PAGE:
            both.close(session)
            del texts[session]
            if chance.random() < 0.3:  # somebody comes back all the same
                both.ask(None, text, [7])


@pytest.mark.parametrize("seed", [2, 9])
def test_the_shadow_finds_what_the_tree_finds(seed: int) -> None:
    both = Both()
    live(both, seed)
    differing = [each for each in both.found if each[0] != each[1]]
    assert not differing, differing
    assert both.shadow.evicted


def test_it_matters_that_the_shadow_is_told() -> None:
    both = Both(tells_shadow=False)
    live(both, 0)
    assert [each for each in both.found if each[0] != each[1]]


@pytest.mark.parametrize("by_hint", [True, False])
def test_an_observing_server_tells_its_shadow(by_hint: bool) -> None:
    driver = TreeDriver(options=ImportanceOptions(policy="observe"))
    pair = ShadowPair(64, PAGE, driver.component.state.policy.cost, 256)
    shadowing = shadowed(driver.component, pair)
    for session, start in (("a", 0), ("b", 1000)):
        request = driver.admit(prompt(start, 3))
        request.session_id = session
        if by_hint and session == "a":
            request.kv_hints = envelope(session_over=True)
        driver.prefill(request)
        driver.decode(request, [7])
        driver.finish(request)
    if not by_hint:
        close(driver, "a")
    settle(shadowing)
    given_back = {
        node.pages[0]: node.metadata.is_given_back for node in pair.importance.nodes() if node.metadata
    }
    assert given_back == {Both.pages(prompt(0, 3))[0]: True, Both.pages(prompt(1000, 3))[0]: False}
    assert not any(driver.component.state.tree.metadata(node).expendable for node in driver.all_nodes())
