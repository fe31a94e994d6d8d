"""Ranks of one tree: what they agree on, and what a rank does whose answers nobody reads."""

from __future__ import annotations

import json
import random

import pytest

from sglang_importance.operations.handlers import FOLLOWED, OPERATIONS
from sglang_importance.operations.runner import Desk, Reply
from sglang_importance.tree.ranks import Ranks

from support.drivers.tree_driver import PAGE, TreeDriver
from support.two_ranks import printed_by_ranks

RANK = """
    import json, sys
    import torch.distributed as dist
    from sglang_importance.tree import ranks

    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    ranks.steady_time = lambda: 1.7e9 + 1 / 3 + 3600 * rank
    ours = ranks.Ranks(dist.group.WORLD)
    told = {"leads": ours.leads, "now": ours.now()}
    told["from_leader"] = ours.from_leader(["leader", "other"][rank])
    told["union"] = sorted(ours.union([[4], [9, 4]][rank]))
    print(json.dumps({**told, "nothing": ours.from_leader(None if rank == 0 else "other")}))
"""


def test_two_ranks_have_the_leaders_clock_and_files(tmp_path) -> None:
    first, second = map(json.loads, printed_by_ranks(RANK, tmp_path))
    assert (first.pop("leads"), second.pop("leads")) == (True, False)
    assert first == second
    assert first == {"now": 1.7e9 + 1 / 3, "from_leader": "leader", "union": [4, 9], "nothing": None}


def test_a_rank_that_is_alone_asks_nobody() -> None:
    alone = Ranks()
    assert alone.leads
    assert alone.from_leader("own") == "own"
    assert alone.union([3, 1]) == {1, 3}
    assert alone.now() > 1.7e9


@pytest.fixture
def driver() -> TreeDriver:
    driver = TreeDriver(tokens=4096)
    for seed in range(8):
        request = driver.admit(random.Random(seed).choices(range(50), k=4 * PAGE))
        driver.prefill(request)
        driver.finish(request)
    return driver


def pin(tokens: list[int]) -> dict:
    return {"pin_id": "p", "tokens": tokens, "extra_key": None, "cache_salt": None, "expires_at": None}


def test_who_follows_changes_the_tree_alike_and_reads_nothing(driver: TreeDriver) -> None:
    follower = Desk(driver.cache, FOLLOWED, follows=True)
    for operation in OPERATIONS.keys() - FOLLOWED.keys():
        assert follower.begin(operation, {}) == Reply()
    prompt = list(range(2 * PAGE))
    reply = follower.begin("pin", pin(prompt))
    assert json.loads(reply.document)["tokens"] == len(prompt)
    assert follower.begin("pins", {}).document == "{}"
    assert follower.begin("events", {}).document == "{}"
    assert follower.begin("unpin", {"pin_id": "p"}).error is None
    assert not follower._jobs


def test_jobs_have_the_same_numbers_on_all_ranks(driver: TreeDriver) -> None:
    """A pin of many pages takes several slices, in which the leader also reads for others."""
    leader, follower = (
        Desk(driver.cache, OPERATIONS),
        Desk(TreeDriver(tokens=4096).cache, FOLLOWED, follows=True),
    )
    long = list(range(3000 * PAGE))
    question = {"limit": 10, "cursor": None, "min_tokens": 0}
    for desk in (leader, follower):
        desk.begin("snapshot", question)
    assert leader.begin("pin", pin(long)).job == follower.begin("pin", pin(long)).job == 2
    for desk in (leader, follower):
        desk.begin("snapshot", question)
    while (job := leader.resume(2).job) is not None:
        assert follower.resume(job).job == job
    assert follower.resume(2).job is None
    assert not follower._jobs
