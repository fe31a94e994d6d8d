"""An exception in any callback of ours: serving goes on, by LRU where learning or ranking failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.unified_cache.components import FullComponent

from sgl_importance.metrics_table import FaultPlace
from sglang_importance.cache.admissions import Admissions
from sglang_importance.cache.component import ImportanceComponent
from sglang_importance.operations.job import Document, Job
from sglang_importance.operations.runner import Desk
from sglang_importance.tree.faults import Faults, UpstreamError, upstream

from support.callbacks import LEARNING, OBSERVING, RECORDING, name_of
from support.drivers.soak_history import Soak
from support.drivers.tree_driver import TreeDriver
from support.drivers.tree_requests import prompt, serve
from support.nightly_cases import rest_nightly

OPERATIONS = 300
POOL = 768


class Planned(Exception):
    """What the tests raise."""


def break_call(patch: pytest.MonkeyPatch, owner: type, method: str, number: int) -> Callable[[], int]:
    """Lets one call of a method raise, and those after it work; returns the number of calls so far."""
    original = getattr(owner, method)
    calls = 0

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Planned(name_of(owner, method))
        return original(self, *args, **kwargs)

    patch.setattr(owner, method, broken)
    return lambda: calls


class FaultySoak(Soak):
    """A soak whose accounts of ours are checked until they are given up, and upstream's all the time."""

    def _check(self, live: list[Any]) -> None:
        if self.driver.component.state.faults.is_learning:
            super()._check(live)

    def _pin(self) -> bool:
        return self._ask(super()._pin)

    def _unpin(self) -> bool:
        return self._ask(super()._unpin)

    def _let_time_pass(self) -> None:
        self._ask(super()._let_time_pass)

    def _ask(self, operation: Callable[[], Any]) -> Any:
        """On a server what fails in an operation is its caller's answer, and there is none after a fault."""
        faults = self.driver.component.state.faults
        try:
            return faults.is_learning and operation()
        except AssertionError:
            assert not faults.is_learning
            return False


def check_victims(patch: pytest.MonkeyPatch) -> list[int]:
    """Looks at every device victim after the fallback: it must be upstream's, the least recently used."""
    seen: list[int] = []
    choose = ImportanceComponent._evict_device_next_node

    def checked(component: ImportanceComponent, *args: Any, **named: Any) -> int | None:
        node_id = choose(component, *args, **named)
        if node_id is not None and not component.state.faults.is_learning:
            core = component.tree_core
            rank = core.eviction_strategy.get_priority
            assert rank(core.node_by_id(node_id)) == min(map(rank, core.evictable_device_leaves))
            seen.append(node_id)
        return node_id

    patch.setattr(ImportanceComponent, "_evict_device_next_node", checked)
    return seen


CASES = [("importance", *each) for each in LEARNING] + [("observe", *each) for each in OBSERVING]
FIRST_OF_CLASS = [
    case for at, case in enumerate(CASES) if case[1] not in [before[1] for before in CASES[:at]]
]


@pytest.mark.parametrize(
    ("kind", "owner", "method", "number"),
    rest_nightly(
        [*FIRST_OF_CLASS, *(case for case in CASES if case not in FIRST_OF_CLASS)], daily=len(FIRST_OF_CLASS)
    ),
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_a_fault_in_learning_or_ranking_leaves_a_server_that_evicts_by_lru(
    kind, owner: type, method: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = break_call(monkeypatch, owner, method, number)
    victims = check_victims(monkeypatch)
    uses_g = kind == "importance"
    soak = FaultySoak(kind, "write_through", seed=3, tokens=POOL, uses_g=uses_g, counts_objects=False)
    for _ in soak.run(OPERATIONS, check_every=25, idle_every=100):
        pass  # upstream's own check runs whenever the cache is idle, and KV is looked at when it is found
    state = soak.driver.component.state
    assert calls() >= number
    assert state.faults.fallback is not None
    assert state.faults.fallback.error == f"Planned: {name_of(owner, method)}"
    assert sum(state.faults.counts.values()) == 1, "nothing of ours runs any more"
    assert victims
    assert soak.driver.checked_tokens > 500


@pytest.mark.parametrize(("owner", "method", "number"), rest_nightly(RECORDING))
def test_a_fault_of_the_recording_ends_nothing(
    owner: type, method: str, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_call(monkeypatch, owner, method, number)
    soak = Soak("importance", "write_through", seed=3, record_to=tmp_path, counts_objects=False)
    for _ in soak.run(200, check_every=25, idle_every=100):
        pass
    faults = soak.driver.component.state.faults
    assert faults.is_learning
    assert faults.counts[FaultPlace.RECORDING] == 1


@pytest.mark.parametrize("number", [1, 3])
def test_requests_are_counted_once_each_though_learning_has_ended(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_call(monkeypatch, Admissions, "admit", number)
    driver = TreeDriver()
    prompts = [prompt(0, 2), prompt(0, 3), prompt(500, 4), prompt(0, 2)]
    for tokens in prompts:
        serve(driver, tokens)
    state = driver.component.state
    assert not state.faults.is_learning
    assert state.policy.clock == number - 1, "the clock of learning stands still"
    assert state.counters.requests == len(prompts)
    assert state.counters.prompt_tokens == sum(map(len, prompts))


def test_an_answer_whose_time_cannot_be_noted_is_an_answer() -> None:
    driver = TreeDriver()
    desk = Desk(driver.cache, {"clock": lambda cache, _: {"clock": 0}}, on_slice=lambda *_: 1 // 0)
    assert desk.begin("clock", {}).document == '{"clock": 0}'
    faults = driver.component.state.faults
    assert faults.counts[FaultPlace.METRICS] == 1
    assert faults.is_learning


def _unsaid(cache: object, arguments: Document) -> Job:
    """Yields once, and then has an answer that no JSON says."""
    yield
    return {"answer": object()}


@pytest.mark.parametrize(
    "operation", [lambda *_: 1 // 0, lambda *_: {"answer": object()}, _unsaid], ids=["raises", "odd", "late"]
)
def test_what_an_operation_raises_is_its_answer_and_counted_when_that_is_published(operation) -> None:
    driver = TreeDriver()
    counts = driver.component.state.faults.counts
    published = []
    desk = Desk(
        driver.cache,
        {"broken": operation},
        on_slice=lambda *_: published.append(counts[FaultPlace.OPERATION]),
    )
    reply = desk.begin("broken", {})
    if reply.job is not None:
        reply = desk.resume(reply.job)
    assert reply.status == 500
    assert published[-1] == counts[FaultPlace.OPERATION] == 1


def test_nodes_that_nobody_took_in_do_not_outlive_a_flush() -> None:
    driver = TreeDriver()
    serve(driver, prompt(0, 4))
    (node,) = driver.component.state.tree.nodes()
    driver.component.leaves._unknown_host_leaves.append(node)
    driver.cache.reset()
    assert driver.component.leaves.take_unknown_host_leaves() == []


def test_the_fault_is_logged_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults(dict.fromkeys(FaultPlace, 0), lambda: 7)
    let_go = []
    faults.on_fallback.append(lambda: let_go.append(True))
    for _ in range(3):
        assert faults.beside(FaultPlace.METRICS, lambda: 1 // 0) is None
    assert faults.is_learning
    assert faults.learn(FaultPlace.RANKING, lambda: 1 // 0) is None
    assert faults.learn(FaultPlace.RANKING, pytest.fail, "no more of it") is None
    assert let_go == [True]
    assert [record.exc_info is not None for record in caplog.records] == [True, True, False]
    assert faults.describe() == {
        "counts": {"ranking": 1, "metrics": 3},
        "fallback": {
            "evicts_by": "lru",
            "place": "ranking",
            "error": "ZeroDivisionError: integer division or modulo by zero",
            "clock": 7,
            "time": faults.fallback.time,
        },
    }


def test_errors_of_sglang_itself_stay_fatal() -> None:
    faults = Faults(dict.fromkeys(FaultPlace, 0), lambda: 0)

    def calls_upstream() -> None:
        with upstream():
            raise AssertionError("a slot was freed twice")

    with pytest.raises(UpstreamError, match="a slot was freed twice"):
        faults.learn(FaultPlace.RANKING, calls_upstream)


def test_an_error_of_upstream_s_own_hook_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = TreeDriver()
    serve(driver, prompt(0, 4))
    monkeypatch.setattr(FullComponent, "evict_component", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        driver.evict(1)
