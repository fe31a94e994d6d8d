"""What the live page asks for: the tree with its left-out parts, one node, a search, and the last events."""

from __future__ import annotations

import json
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.observe.trace.records import EventKind
from sgl_importance.signal.node_importance import NodeImportance, Origin
from sgl_importance.tiers import Tier
from sglang_importance.operations import job as job_module
from sglang_importance.operations.handlers import OPERATIONS
from sglang_importance.operations.node_view import MAX_CELLS, strip
from sglang_importance.operations.prefix_search import common_prefix
from sglang_importance.operations.runner import Desk
from sglang_importance.operations.tiered_pages_view import NodePages
from sglang_importance.tree.event_log import EventLog

from support.drivers.tree_driver import PAGE
from support.drivers.tree_requests import prompt, serve

WHOLE = {"root": None, "depth": 64, "min_tokens": 0, "limit": 1000}


def ask(driver, operation: str, **arguments):
    desk = Desk(driver.cache, OPERATIONS)
    reply = desk.begin(operation, arguments)
    while reply.job is not None:
        reply = desk.resume(reply.job)
    return json.loads(reply.document) if reply.document else reply


def tree(driver, **arguments):
    return ask(driver, "tree", **(WHOLE | arguments))


@pytest.fixture
def driver(make_driver):
    driver = make_driver(tokens=4096)
    for start in range(0, 3000, 100):
        serve(driver, prompt(start % 1000, 3) + prompt(start + 50, 2))
    return driver


@pytest.fixture
def every_node_is_a_slice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_module, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(job_module, "CALLS_PER_LOOK", 1)


# ---- tree ----


def test_the_whole_tree_is_listed_parents_first_with_what_lies_below(driver, every_node_is_a_slice):
    document = tree(driver)
    rows = {row["id"]: row for row in document["nodes"]}
    assert set(rows) == {node.id for node in driver.component.state.tree.nodes()}
    assert document["more"] == {"nodes": 0, "tokens": 0}
    seen = set()
    for row in document["nodes"]:
        assert row["parent"] is None or row["parent"] in seen
        seen.add(row["id"])
        below = [each for each in document["nodes"] if each["parent"] == row["id"]]
        assert row["subtree"]["tokens"] == row["tokens"] + sum(each["subtree"]["tokens"] for each in below)
        assert row["subtree"]["nodes"] == 1 + sum(each["subtree"]["nodes"] for each in below)
    top = [row["subtree"]["tokens"] for row in document["nodes"] if row["parent"] is None]
    assert document["total"] == {"nodes": len(rows), "tokens": sum(top)}
    assert document["tiers"]["device"]["used_tokens"] == sum(top)


@pytest.mark.parametrize("bound", [{"limit": 7}, {"depth": 1}, {"min_tokens": 4 * PAGE}, {"limit": 1}])
def test_what_is_left_out_is_counted(driver, bound):
    whole = tree(driver)
    part = tree(driver, **bound)
    assert 0 < len(part["nodes"]) < len(whole["nodes"])
    assert part["total"] == whole["total"]
    listed = part["nodes"]
    left_out = [part["more"], *(row["more"] for row in listed)]
    assert len(listed) + sum(each["nodes"] for each in left_out) == whole["total"]["nodes"]
    tokens = sum(row["tokens"] for row in listed) + sum(each["tokens"] for each in left_out)
    assert tokens == whole["total"]["tokens"]


def test_a_node_of_exactly_as_many_tokens_is_listed(driver):
    tokens = sorted(row["subtree"]["tokens"] for row in tree(driver)["nodes"])
    bound = tokens[len(tokens) // 2]
    listed = tree(driver, min_tokens=bound)["nodes"]
    assert len(listed) == sum(each >= bound for each in tokens) > sum(each > bound for each in tokens)


def test_the_largest_nodes_are_listed_first(driver):
    whole = tree(driver)["nodes"]
    largest = sorted(whole, key=lambda row: (-row["subtree"]["tokens"], row["id"]))[:5]
    assert {row["id"] for row in tree(driver, limit=5)["nodes"]} == {row["id"] for row in largest}


def test_a_subtree_begins_with_its_node(driver):
    whole = {row["id"]: row for row in tree(driver)["nodes"]}
    root = next(row for row in whole.values() if row["subtree"]["nodes"] > 2)
    part = tree(driver, root=root["id"])
    assert part["nodes"][0] == root
    assert len(part["nodes"]) == root["subtree"]["nodes"]
    assert ask(driver, "tree", **(WHOLE | {"root": 10**9})).status == 404
    assert ask(driver, "node", node=driver.core.root_node.id).status == 404


def test_siblings_are_chosen_slice_by_slice(driver, every_node_is_a_slice):
    """There may be a hundred thousand of them below one node, and the answer lists a few."""
    nodes = len(list(driver.component.state.tree.nodes()))
    slices = sum(1 for _ in OPERATIONS["tree"](driver.cache, WHOLE | {"limit": 1}))
    first_level = len(driver.core.root_node.children)
    assert first_level > 5
    assert slices >= 2 * nodes + first_level


def test_the_tree_may_change_between_slices(driver, every_node_is_a_slice):
    before = {node.id for node in driver.component.state.tree.nodes()}
    desk = Desk(driver.cache, OPERATIONS)
    reply = desk.begin("tree", WHOLE)
    step = 0
    while reply.job is not None:
        step += 1
        if step % 10 == 0:
            driver.evict(2 * PAGE)
            serve(driver, prompt(10_000 + 10 * step, 3))
        reply = desk.resume(reply.job)
    document = json.loads(reply.document)
    listed = {row["id"] for row in document["nodes"]}
    assert listed
    assert listed < before
    assert all(row["parent"] in {*listed, None} for row in document["nodes"])
    driver.component.check_integrity()


# ---- one node ----


def test_a_node_is_described_in_full(driver):
    row = next(row for row in tree(driver)["nodes"] if row["parent"] is not None)
    node = ask(driver, "node", node=row["id"])
    same = set(row) - {"subtree", "more", "leading_ids"}
    assert {key: node[key] for key in same} == {key: row[key] for key in same}
    assert node["path"][-2:] == [row["parent"], row["id"]]
    assert node["head_ids"][: len(row["leading_ids"])] == row["leading_ids"]
    assert node["last_move"]["kind"] in ("insert", "split")
    assert len(node["strip"]["cross_mass"]) == node["pages"] == row["tokens"] // PAGE


def test_the_prompt_of_a_node_can_be_pinned_and_the_pin_is_found_on_it(driver):
    row = max(tree(driver)["nodes"], key=lambda row: row["depth_tokens"])
    body = ask(driver, "node_prompt", node=row["id"])
    assert len(body["input_ids"]) == row["depth_tokens"] + row["tokens"]
    tokens = body.pop("input_ids")
    ask(driver, "pin", pin_id="p", tokens=tokens, expires_at=None, **body)
    pinned = ask(driver, "node", node=row["id"])
    assert pinned["pinned"]
    assert pinned["pins"] == [{"pin_id": "p", "source": "requested", "tokens": len(tokens)}]


@given(pages=st.integers(1, 3 * MAX_CELLS))
def test_a_strip_is_bounded_and_loses_no_mass(pages: int):
    importance = NodeImportance(pages, creator=0)
    body = np.arange(1.0, pages + 1)
    importance.observe(1, body, body, uniform=0.0, weight=1.0, first=True, decay=1.0)
    cells = strip(importance)
    assert len(cells["cross_mass"]) == -(-pages // cells["pages_per_cell"]) <= MAX_CELLS
    assert sum(cells["cross_mass"]) == pytest.approx(importance.body_mass(Origin.CROSS).sum(), rel=1e-3)
    assert max(cells["peak"]) == pytest.approx(pages, rel=1e-3)
    assert not any(cells["self_mass"])


@given(pages=st.integers(1, 3 * MAX_CELLS), seed=st.integers(0, 99))
def test_a_cell_of_tiered_pages_is_as_chosen_as_its_best_page(pages: int, seed: int):
    rng = np.random.default_rng(seed)
    tiered = NodePages(resident=rng.integers(0, 2, pages).astype(float), chosen=rng.random(pages))
    cells = strip(NodeImportance(pages, creator=0), tiered)
    wide = cells["pages_per_cell"]
    starts = range(0, pages, wide)
    for name, of_cell in (("resident", np.mean), ("chosen", np.max)):
        expected = [of_cell(getattr(tiered, name)[start : start + wide]) for start in starts]
        assert cells[name] == pytest.approx(expected, rel=1e-3)


# ---- search ----


def test_a_prefix_is_found_down_to_a_part_of_a_page(driver):
    tokens = prompt(0, 3) + prompt(50, 2)
    namespace = {"extra_key": None, "cache_salt": None, "any_namespace": False}
    found = ask(driver, "find", tokens=[*tokens, 1, 2, 3], **namespace)
    assert (found["matched_tokens"], found["tokens"]) == (5 * PAGE, 5 * PAGE + 3)
    assert sum(part["tokens"] for part in found["path"]) == 5 * PAGE
    part = ask(driver, "find", tokens=tokens[: PAGE + 1], **namespace)
    assert part["matched_tokens"] == PAGE + 1
    assert part["path"][0]["id"] == found["path"][0]["id"]
    assert ask(driver, "find", tokens=[399] * 8, **namespace)["path"] == []


def test_a_prefix_is_found_in_one_namespace_or_in_any(driver):
    tokens = prompt(10_000, 3)
    serve(driver, [*tokens, 1], salt="tenant")

    def matched(salt: str | None, *, any_namespace: bool = False) -> int:
        namespace = {"extra_key": None, "cache_salt": salt, "any_namespace": any_namespace}
        return ask(driver, "find", tokens=tokens, **namespace)["matched_tokens"]

    assert (matched("tenant"), matched(None, any_namespace=True)) == (3 * PAGE, 3 * PAGE)
    assert (matched("other"), matched(None)) == (0, 0)
    serve(driver, [*tokens[: 2 * PAGE], 1])
    assert (matched(None), matched(None, any_namespace=True)) == (2 * PAGE, 3 * PAGE)


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_common_prefix(left: list[int], right: list[int]):
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    assert common_prefix(left, right) == shared


# ---- events ----


def test_events_say_what_happened_and_why(make_driver):
    driver = make_driver(tokens=64 * PAGE)
    first = ask(driver, "events", since=0, limit=100)
    serve(driver, prompt(0, 4))
    serve(driver, prompt(0, 2) + prompt(500, 2))
    driver.evict(2 * PAGE)
    answer = ask(driver, "events", since=first["next"], limit=100)
    told = [(event["kind"], event["reason"]) for event in answer["events"]]
    assert told[:3] == [("insert", "computed"), ("split", "paths_part"), ("insert", "computed")]
    assert ("evict", "least_loss") in told
    assert [event["serial"] for event in answer["events"]] == list(range(first["next"], answer["next"]))
    assert answer["left_out"] == 0
    assert "hit" not in {kind for kind, _ in told}
    assert ask(driver, "events", since=answer["next"], limit=100)["events"] == []


def test_a_pin_s_beginning_and_end_are_events_without_a_request(make_driver):
    driver = make_driver(tokens=64 * PAGE)
    now = 100.0
    driver.component.pins.now = lambda: now
    first = ask(driver, "events", since=0, limit=100)["next"]
    namespace = {"extra_key": None, "cache_salt": None}
    ask(driver, "pin", pin_id="p", tokens=prompt(0, 3), expires_at=160.0, **namespace)
    assert [event["kind"] for event in ask(driver, "events", since=first, limit=100)["events"]] == ["pin"]
    now = 160.0
    begun, ended = ask(driver, "events", since=first, limit=100)["events"]
    assert (begun["reason"], ended["kind"], ended["reason"]) == ("asked_for", "unpin", "expired")
    assert begun["pin_id"] == ended["pin_id"] == "p"
    assert begun["tokens"] == ended["tokens"] == 3 * PAGE
    assert begun["node"] is ended["node"] is None
    assert ask(driver, "pins")["pins"] == []


@pytest.fixture
def small_log():
    return EventLog(lambda: 3, capacity=5)


def test_the_log_forgets_the_oldest_and_says_so(small_log):
    for node_id in range(12):
        small_log.record(EventKind.INSERT, Tier.DEVICE, SimpleNamespace(id=node_id, key=range(4)), "computed")
    assert [(serial, event.node) for serial, event in small_log.since(0, 100)] == [
        (serial, serial) for serial in range(7, 12)
    ]
    assert [serial for serial, _ in small_log.since(0, 2)] == [10, 11]
    assert [serial for serial, _ in small_log.since(9, 100)] == [9, 10, 11]
    assert small_log.since(12, 100) == small_log.since(99, 100) == []
    assert small_log.last_of(8).node == 8
    assert small_log.last_of(3) is None


class Unread(deque):
    """What may be appended to, and not looked through."""

    def _read(self, *_: object) -> None:
        raise AssertionError("an event is recorded in constant time")

    __iter__ = __reversed__ = __contains__ = __getitem__ = count = index = remove = copy = _read  # type: ignore[assignment]


def test_an_event_is_recorded_without_a_look_at_the_others(small_log):
    small_log._events = Unread(maxlen=small_log._events.maxlen)
    for _ in range(8):
        small_log.record(EventKind.INSERT, Tier.DEVICE, SimpleNamespace(id=1, key=range(4)), "computed")
    assert (small_log.total, len(small_log._events)) == (8, 5)
