"""The snapshot is taken in short slices, of a tree that may change in between."""

from __future__ import annotations

import heapq
import json
from types import SimpleNamespace

import pytest

from sglang_importance.operations import job as job_module
from sglang_importance.operations.handlers import OPERATIONS
from sglang_importance.operations.job import NotFound, run_slice
from sglang_importance.operations.runner import MAX_JOBS, Desk
from sglang_importance.operations.snapshot import InvalidCursor, decode_cursor, encode_cursor, snapshot

from support.drivers.tree_driver import PAGE
from support.drivers.tree_requests import prompt, serve


def document_of(cache, **kwargs):
    job = snapshot(cache, **kwargs)
    while (document := run_slice(job)) is None:
        pass
    return document


@pytest.fixture
def driver(make_driver):
    driver = make_driver(tokens=4096)
    for start in range(0, 6000, 100):
        serve(driver, prompt(start % 2000, 3) + prompt(start + 50, 2))
    return driver


@pytest.fixture
def every_node_is_a_slice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_module, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(job_module, "CALLS_PER_LOOK", 1)


def test_slices_make_up_the_same_document(driver, every_node_is_a_slice, monkeypatch: pytest.MonkeyPatch):
    sliced = document_of(driver.cache, limit=1000)
    monkeypatch.setattr(job_module, "SLICE_SECONDS", 1000.0)
    assert run_slice(snapshot(driver.cache, limit=1000)) == sliced
    assert len(sliced["nodes"]) == len(list(driver.component.state.tree.nodes()))


def test_what_is_described_is_chosen_slice_by_slice(driver, every_node_is_a_slice, monkeypatch):
    """Of a hundred thousand nodes, to name a hundred: no step may look at all of them."""
    monkeypatch.setattr(heapq, "nlargest", lambda *_: pytest.fail("all nodes in one step"))
    nodes = len(list(driver.component.state.tree.nodes()))
    document = document_of(driver.cache, limit=7)
    assert len(document["nodes"]) == 7
    assert nodes > 50
    losses = [node["loss"] for node in document_of(driver.cache, limit=1000)["nodes"]]
    assert [node["loss"] for node in document["nodes"]] == losses[:7] == sorted(losses, reverse=True)[:7]


def test_a_parent_is_never_less_reusable_than_its_child(driver):
    nodes = {node["id"]: node for node in document_of(driver.cache, limit=1000)["nodes"]}
    children = [node for node in nodes.values() if node["parent"] is not None]
    assert children
    assert all(nodes[node["parent"]]["p_reuse"] >= node["p_reuse"] for node in children)


def test_the_tree_may_change_between_slices(driver, every_node_is_a_slice):
    before = {node.id for node in driver.component.state.tree.nodes()}
    job = snapshot(driver.cache, limit=1000)
    step = 0
    while (document := run_slice(job)) is None:
        step += 1
        if step % 20 == 0:
            driver.evict(2 * PAGE)
            serve(driver, prompt(10_000 + 10 * step, 3))
    listed = {node["id"] for node in document["nodes"]}
    assert step > 100
    assert listed
    assert listed < before, "nodes that left before they were described are left out"
    driver.component.check_integrity()


def test_a_slice_ends_at_the_first_look_at_the_clock_behind_its_time(driver, monkeypatch):
    """Nodes take a known time each: a slice has as many as fit, and those up to its next look."""
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(job_module, "time", clock)
    seconds_per_node = job_module.SLICE_SECONDS / 40
    nodes = 0
    metadata = driver.component.state.tree.metadata

    def slow_metadata(node):
        nonlocal nodes
        nodes += 1
        clock.now += seconds_per_node
        return metadata(node)

    monkeypatch.setattr(driver.component.state.tree, "metadata", slow_metadata)
    job = snapshot(driver.cache, limit=1000)
    slices, done = [], None
    while done is None:
        before = nodes
        done = run_slice(job)
        slices.append(nodes - before)
    assert len(slices) > 5
    assert max(slices) <= 40 + job_module.CALLS_PER_LOOK


@pytest.fixture
def desk(driver) -> Desk:
    return Desk(driver.cache, OPERATIONS)


def test_each_process_that_answers_http_has_its_own_places(driver, every_node_is_a_slice):
    desk = Desk(driver.cache, OPERATIONS, max_jobs=2 * MAX_JOBS)
    jobs = [desk.begin("snapshot", {}).job for _ in range(2 * MAX_JOBS)]
    assert all(desk.resume(job).error is None for job in jobs)


def test_the_desk_drops_the_oldest_of_too_many_jobs(desk, every_node_is_a_slice):
    jobs = [desk.begin("snapshot", {}).job for _ in range(MAX_JOBS + 1)]
    dropped = desk.resume(jobs[0])
    assert (dropped.status, dropped.error) == (
        503,
        f"more than {MAX_JOBS} answers were under way at once, of which this was the oldest: ask again",
    )
    reply = desk.resume(jobs[1])
    while reply.job is not None:
        reply = desk.resume(reply.job)
    assert reply.document


def test_pages_in_order_are_the_whole_tree_and_no_node_comes_twice(driver):
    whole = [node["id"] for node in document_of(driver.cache, limit=1000)["nodes"]]
    read, cursor = [], None
    while len(read) <= len(whole):
        page = document_of(driver.cache, limit=7, cursor=cursor)
        read += [node["id"] for node in page["nodes"]]
        if (cursor := page["next_cursor"]) is None:
            break
    assert read == whole


def test_cursors_round_trip_and_others_are_refused(driver, desk):
    assert decode_cursor(encode_cursor((0.1 + 0.2, 7))) == (0.1 + 0.2, 7)
    with pytest.raises(InvalidCursor, match="next_cursor"):
        run_slice(snapshot(driver.cache, cursor="bm90IG91cnM="))
    refused = desk.begin("snapshot", {"cursor": "%%%"})
    assert refused.status == 400
    assert "next_cursor" in refused.error


def test_an_operation_that_needs_no_slices_answers_at_once(driver):
    def unknown(scheduler, arguments):
        raise NotFound(f"nothing named {arguments['name']}")

    operations = {"clock": lambda cache, _: {"clock": cache.importance.state.policy.clock}}
    desk = Desk(driver.cache, {**operations, "unknown": unknown})
    assert json.loads(desk.begin("clock", {}).document)["clock"] == driver.component.state.policy.clock
    reply = desk.begin("unknown", {"name": "x"})
    assert (reply.status, reply.error, reply.document) == (404, "nothing named x", "")
