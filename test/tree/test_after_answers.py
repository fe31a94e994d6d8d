"""What a request said is taken in behind the answers of its pass, with the result that it would have had."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sglang_importance.tree.deferred_work import DeferredWork

from support.drivers.tree_driver import PAGE, Request, TreeDriver


def test_work_waits_for_the_end_of_a_pass_and_for_nothing_else() -> None:
    after, done = DeferredWork(), []

    def process(batch: str, result: str) -> None:
        for name in (batch, result):
            after.do(lambda name=name: done.append(name))
        done.append("answered")

    after.around(process)("first", result="second")
    after.do(lambda: done.append("at once"))
    assert done == ["answered", "first", "second", "at once"]


def test_a_pass_that_fails_is_over() -> None:
    after, done = DeferredWork(), []

    def process() -> None:
        raise RuntimeError("upstream")

    with pytest.raises(RuntimeError, match="upstream"):
        after.around(process)()
    after.do(lambda: done.append("at once"))
    assert done == ["at once"]


def _prompt(start: int, num_pages: int) -> list[int]:
    return list(range(start, start + num_pages * PAGE))


def _running(driver: TreeDriver, answer: list[int]) -> Request:
    """A request that has decoded its answer."""
    request = driver.admit(_prompt(0, 3))
    driver.prefill(request, body=np.array([1.0, 2.0, 3.0]))
    driver.decode(request, answer, body=np.arange(1.0, 6.0))
    return request


def _left(driver: TreeDriver, *, in_one_pass: bool) -> list[tuple]:
    """What is known of each node when two requests have ended; one cuts what the other has just left."""
    driver.rows.discard = lambda slot: None  # a server's rows stay until their slot is taken again
    running = [_running(driver, [70] * PAGE + [last] * PAGE) for last in (80, 90)]
    folds = driver.component.state.counters.folds

    def process_batch_result() -> None:
        for request in running:
            driver.finish(request)
        assert (driver.component.state.counters.folds == folds) == in_one_pass

    after = driver.component.deferred_work
    (after.around(process_batch_result) if in_one_pass else process_batch_result)()
    assert driver.component.state.counters.folds == folds + len(running)
    assert not driver.rows.scores
    driver.cache.sanity_check()
    tree = driver.component.state.tree
    return sorted(
        (
            tree.end_digest(node),
            tree.metadata(node).importance.page_vectors().round(12).tolist(),
            tree.metadata(node).importance.queries,
            tree.metadata(node).reuse_class,
        )
        for node in driver.all_nodes()
    )


def test_requests_that_end_in_one_pass_leave_what_they_would_leave_one_by_one(
    make_driver: Callable[..., TreeDriver],
) -> None:
    later = _left(make_driver(), in_one_pass=True)
    at_once = _left(make_driver(), in_one_pass=False)
    assert later == at_once
    assert len(later) == 5, "the prompt in two, what both answers begin with, and how each ends"


def test_a_path_that_left_the_tree_meanwhile_takes_nothing_in(make_driver: Callable[..., TreeDriver]) -> None:
    driver = make_driver()
    request = _running(driver, [70] * PAGE)

    def process() -> None:
        driver.finish(request)
        driver.evict(driver.cache.token_to_kv_pool_allocator.size)

    driver.component.deferred_work.around(process)()
    assert not list(driver.all_nodes())
    driver.cache.sanity_check()
