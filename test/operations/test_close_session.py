"""Closing a session where a lower tier, or a fault, stands in the way; on a real tree."""

from __future__ import annotations

import json

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sgl_importance.metrics_table import FaultPlace
from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.operations.handlers import OPERATIONS, WITHOUT_LEARNING
from sglang_importance.operations.runner import Desk

from support.doubles.lower_tiers import LowerTiers
from support.drivers.tree_driver import PAGE, TreeDriver
from support.drivers.tree_requests import prompt

NAME = {"session_id": "a", "extra_key": None, "cache_salt": None, "at_once": True}


def ask(driver: TreeDriver, tokens: list[int]) -> None:
    request = driver.admit(tokens)
    request.session_id = "a"
    driver.prefill(request)
    driver.decode(request, [7])
    driver.finish(request)


def test_at_once_copies_nothing_to_a_host_that_has_what_is_behind() -> None:
    driver = TreeDriver(tokens=128, options=ImportanceOptions(policy="importance"))
    tiers = LowerTiers.attach(driver.cache, host_tokens=192, write_policy="write_back", storage=True)
    driver.filter_backups()
    front, tail = prompt(0, 2), prompt(0, 4)
    ask(driver, front)
    ask(driver, tail)
    (last,) = (node for node in driver.all_nodes() if not node.children)
    driver.cache.evict(EvictParams(num_tokens=len(last.key)))
    tiers.settle(driver.cache)
    assert [(node.evicted, node.backuped) for node in driver.all_nodes()] == [(False, False), (True, True)]
    closed = OPERATIONS["close_session"](driver.cache, NAME)
    tiers.settle(driver.cache)
    assert closed["given_back_tokens"] == {"device": 2 * PAGE, "host": 2 * PAGE}
    assert not list(driver.all_nodes())
    driver.cache.sanity_check()


def test_a_server_that_learns_no_more_still_says_which_sessions_sglang_has() -> None:
    driver = TreeDriver()
    driver.component.requests.sessions.is_opened = "a".__eq__
    desk = Desk(driver.cache, OPERATIONS, WITHOUT_LEARNING)
    driver.component.state.faults.learn(FaultPlace.LEARNING, lambda: 1 // 0)
    reply = desk.begin("close_session", NAME)
    assert reply.error is None
    answer = json.loads(reply.document)
    assert (answer["was_open"], answer["is_opened"]) == (False, True)
