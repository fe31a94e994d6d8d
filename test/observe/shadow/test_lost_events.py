"""Events that find no room on their way to the shadow caches."""

from __future__ import annotations

import pytest

from sgl_importance.nodes.named_sessions import SessionName
from sgl_importance.observe.shadow.shadow_pair import ShadowPair
from sglang_importance.observe import shadowing as module
from sglang_importance.observe.shadowing import Shadowing

from support.drivers.shadowed_tree import settle, shadowed
from support.drivers.tree_driver import PAGE, Request, TreeDriver
from support.drivers.tree_requests import prompt, serve
from support.waiting import wait_until

Observed = tuple[TreeDriver, ShadowPair, Shadowing]
LONG_ANSWER = [7] * 200
"""Its end finds room in no queue of these tests; each prompt does."""


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> Observed:
    monkeypatch.setattr(module, "QUEUE_BYTES", 1200)
    driver = TreeDriver("observe", tokens=1024)
    pair = ShadowPair(1024 // PAGE, PAGE, driver.component.state.policy.cost, 256)
    return driver, pair, shadowed(driver.component, pair)


def start(driver: TreeDriver, first: int) -> Request:
    request = driver.admit(prompt(first, 3))
    driver.prefill(request)
    return request


def finish(driver: TreeDriver, request: Request, answer: list[int]) -> None:
    driver.decode(request, answer)
    driver.finish(request)


def test_a_request_whose_end_was_lost_keeps_nothing_of_the_shadows(observed: Observed) -> None:
    driver, pair, shadowing = observed
    first = start(driver, 0)
    settle(shadowing)
    finish(driver, first, LONG_ANSWER)
    assert shadowing.document()["dropped_events"] == 1
    second = start(driver, 1000)
    settle(shadowing)
    finish(driver, second, [7])
    settle(shadowing)
    assert shadowing.document()["dropped_events"] == 1
    assert pair.comparison.requests == 2
    for cache in (pair.lru, pair.importance):
        cache.check_integrity()
        assert cache.used == 6, "what both asked for"
        cache.evict(10**6)
        assert cache.used == 0, "nothing is locked"


def test_what_is_told_in_few_words_is_told_later_and_in_its_order(observed: Observed) -> None:
    driver, pair, shadowing = observed
    with shadowing._lock:  # the thread gets no further
        start(driver, 0)
        wait_until(lambda: not shadowing._worker._items)
        for number in range(1, 6):
            start(driver, 1000 * number)
        assert shadowing._dropped == 2, "three fill the queue"
        driver.component.requests.sessions.on_over(SessionName("a session"))
        shadowing.reset()
        assert [bool(event.session) for event in shadowing._owed] == [True, False]
    settle(shadowing)
    assert pair.lru.used > 0
    last = start(driver, 9000)
    settle(shadowing)
    finish(driver, last, [7])
    settle(shadowing)
    assert shadowing.document()["dropped_events"] == 2, "nothing that was told later counts as lost"
    assert pair.lru.used == 3, "the flush was heard ahead of what came behind it"


def test_hits_of_the_server_are_those_of_requests_that_were_followed(observed: Observed) -> None:
    driver, _, shadowing = observed
    long = prompt(0, 50)
    serve(driver, long)
    serve(driver, [*long, 1])
    settle(shadowing)
    assert driver.component.state.counters.hit_tokens, "the server found it"
    document = shadowing.document()
    assert (document["dropped_events"], document["prompt_tokens"], document["server_hit_tokens"]) == (4, 0, 0)
    for _ in range(2):
        serve(driver, prompt(5000, 3))
        settle(shadowing)
    document = shadowing.document()
    assert (document["prompt_tokens"], document["server_hit_tokens"]) == (2 * 3 * PAGE, 2 * PAGE)
    assert document["server_hit_tokens"] == document["lru_hit_tokens"]
