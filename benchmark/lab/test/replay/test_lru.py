"""LRU four ways: policy object, compiled list, hits by stack place, and brute force."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance_lab.policies.lru import LruPolicy
from sgl_importance_lab.replay.cache import replay_objects, replay_tree
from sgl_importance_lab.replay.compiled.fast_lru import replay_lru
from sgl_importance_lab.replay.equivalent import lru_curve
from sgl_importance_lab.replay.formats.detect import read_trace
from sgl_importance_lab.replay.trace import Trace

from support.workloads.replay_traces import object_traces, shared_data, tree_traces

capacities = st.integers(1, 30)


@pytest.fixture(scope="module")
def mooncake() -> Trace:
    return read_trace(shared_data("traces/mooncake_conversation.jsonl"))


@given(tree_traces, capacities)
def test_compiled_lru_counts_what_the_definition_counts(trace: Trace, capacity: int) -> None:
    assert replay_lru(trace, capacity) == replay_tree(trace, LruPolicy(capacity))


@given(object_traces, capacities)
def test_compiled_object_lru_counts_what_the_definition_counts(trace: Trace, capacity: int) -> None:
    assert replay_lru(trace, capacity, object_level=True) == replay_objects(trace, LruPolicy(capacity))


@given(object_traces, capacities)
def test_object_lru_is_the_last_distinct_objects(trace: Trace, capacity: int) -> None:
    blocks = trace.blocks.tolist()
    hits = sum(
        block in list(dict.fromkeys(reversed(blocks[:index])))[:capacity]
        for index, block in enumerate(blocks)
    )
    assert replay_objects(trace, LruPolicy(capacity)).hit_blocks == hits


@given(tree_traces)
def test_curve_is_the_replay_at_every_capacity(trace: Trace) -> None:
    curve = lru_curve(trace)
    for capacity in range(1, trace.num_blocks + 1):
        counts = replay_lru(trace, capacity)
        assert curve.hit_blocks[capacity] == counts.hit_blocks
        assert curve.hit_tokens[capacity] == counts.hit_tokens
        assert curve.full_hits[capacity] == counts.full_hits


@given(object_traces)
def test_object_curve_is_the_replay_at_every_capacity(trace: Trace) -> None:
    curve = lru_curve(trace, object_level=True)
    for capacity in range(1, trace.num_blocks + 1):
        counts = replay_lru(trace, capacity, object_level=True)
        assert curve.hit_blocks[capacity] == counts.hit_blocks
        assert curve.full_hits[capacity] == counts.full_hits


@given(tree_traces, st.integers(0, 200))
def test_equivalent_capacity_is_the_smallest(trace: Trace, hit_blocks: int) -> None:
    curve = lru_curve(trace)
    capacity = curve.capacity_for(hit_blocks)
    if capacity is None:
        assert curve.hit_blocks[-1] < hit_blocks
    else:
        assert curve.hit_blocks[capacity] >= hit_blocks
        assert capacity == 0 or curve.hit_blocks[capacity - 1] < hit_blocks


def test_curve_packs_its_slots() -> None:
    """Many requests over few blocks overflow the slots again and again."""
    blocks = np.tile(np.array([0, 1, 0, 2], dtype=np.int64), 500)
    offsets = np.arange(0, len(blocks) + 1, 2)
    requests = len(offsets) - 1
    trace = Trace(
        "packed",
        1,
        blocks,
        offsets,
        np.array([-1, 0, 0], dtype=np.int64),
        np.full(requests, 2),
        np.zeros(requests, dtype=np.int64),
        np.zeros(requests),
        np.zeros(requests, dtype=np.int8),
    )
    trace.check_integrity()
    curve = lru_curve(trace)
    assert [int(hits) for hits in curve.hit_blocks] == [0, requests - 1, requests - 1, 2 * requests - 3]


@pytest.mark.parametrize(
    ("capacity", "block_hit_rate", "full_hit_rate"),
    [(45697, 0.3535, 0.0097), (91395, 0.3631, 0.0098), (137092, 0.3659, 0.0098), (182790, 0.3664, 0.0098)],
)
def test_published_rows(mooncake: Trace, capacity: int, block_hit_rate: float, full_hit_rate: float) -> None:
    counts = replay_lru(mooncake, capacity)
    assert round(counts.hit_blocks / mooncake.num_accesses, 4) == block_hit_rate
    assert round(counts.full_hits / mooncake.num_requests, 4) == full_hit_rate
    assert counts == replay_tree(mooncake, LruPolicy(capacity))
    assert counts.hit_blocks == lru_curve(mooncake).hit_blocks[capacity]


IN_COMPILED_CODE = """
import signal
import subprocess
import sys

import numpy as np
from sgl_importance_lab.replay.{module} import {function} as compiled

def run(requests):
    blocks = np.arange(requests * 8) // 2
    offsets = np.arange(requests + 1) * 8
    compiled(*{arguments})

def interrupt(*_):
    raise KeyboardInterrupt

run(2)  # compiles
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.01)
try:
    for _ in range(10_000):
        run(200_000)
except KeyboardInterrupt:
    print("interrupted")
"""
CURVE = "blocks, offsets, offsets[1:], len(blocks), 16, 8, False"
RELATIONS = (
    "blocks, offsets, len(blocks), np.zeros(len(blocks), np.int8), 1, 2, np.zeros(len(blocks), np.bool_)"
)


@pytest.mark.parametrize(
    ("module", "function", "arguments"),
    [("equivalent", "_hits_by_place", CURVE), ("trace_turns", "_relations", RELATIONS)],
)
def test_an_interrupt_in_compiled_code_ends_in_no_crash(module: str, function: str, arguments: str) -> None:
    """numba puts results into a tuple without looking whether they could be made: that one cannot be used."""
    script = IN_COMPILED_CODE.format(module=module, function=function, arguments=f"({arguments})")
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "interrupted\n"), run.stderr
