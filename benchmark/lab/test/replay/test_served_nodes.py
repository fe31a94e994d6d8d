"""Node-granular replays of stock's recency and our policy: shadow caches, with answers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance_lab.replay.policy_registry import IMPORTANCE
from sgl_importance_lab.replay.replay_runner import Job, ReplayMode, run_job
from sgl_importance_lab.replay.served_nodes import answer_blocks, replay_served
from sgl_importance_lab.replay.trace import Trace, TraceBuilder

from support.workloads.replay_traces import tree_traces

PAGE = 4


def built(requests: list[tuple[str, int, list[str] | None]]) -> Trace:
    """Prompts of whole blocks, a letter each, and one token; generated tokens; what the answer filled."""
    builder = TraceBuilder("built", PAGE)
    for prompt, output_tokens, answer in requests:
        names = [prompt[:end] for end in range(1, len(prompt) + 1)]
        builder.add(
            [*names, f"end {len(builder._answer_ends)}"],
            input_tokens=PAGE * len(prompt) + 1,
            output_tokens=output_tokens,
            answer=answer,
        )
    trace = builder.build()
    trace.check_integrity()
    return trace


@pytest.mark.parametrize("is_importance", [False, True])
@settings(max_examples=20, deadline=None)
@given(trace=tree_traces, capacity=st.integers(1, 20), chunk=st.none() | st.integers(1, 12))
def test_no_more_is_found_than_without_end_of_memory(
    is_importance: bool, trace: Trace, capacity: int, chunk: int | None
) -> None:
    counts = replay_served(trace, capacity, is_importance=is_importance, chunk_tokens=chunk)
    endless = replay_served(trace, 10**4, is_importance=is_importance)
    assert 0 <= counts.hit_tokens <= endless.hit_tokens <= int(trace.input_tokens.sum())
    assert (endless.evicted_blocks, endless.refused_requests) == (0, 0)
    longest = max((len(trace.request(index)) for index in range(trace.num_requests)), default=0)
    assert (counts.refused_requests > 0) == (longest > capacity)


def test_the_next_turn_finds_the_answer() -> None:
    """Of ten generated tokens, two blocks are full; the last token of a prompt is always computed."""
    trace = built([("ab", 10, None), ("abcde", 1, None), ("abcde", 1, None)])
    assert answer_blocks(trace)[0] == [trace.request(1)[2], trace.request(1)[3]]
    counts = replay_served(trace, 99, is_importance=False)
    assert counts.hit_tokens == PAGE * (0 + 4 + 5)


def test_what_others_had_asked_for_is_no_answer() -> None:
    trace = built([("abcd", 1, None), ("ab", 10, None), ("abcd", 1, None)])
    assert answer_blocks(trace) == [[], [], []]


def test_a_recording_says_what_an_answer_filled() -> None:
    trace = built([("ab", 5, ["abx"]), ("abx", 1, []), ("aby", 1, [])])
    assert trace.answers == ((trace.request(1)[2],), (), ())
    assert replay_served(trace, 99, is_importance=False).hit_tokens == PAGE * (0 + 3 + 2)


@pytest.mark.parametrize("policy", ["lru", IMPORTANCE])
def test_a_request_longer_than_the_cache_is_refused(policy: str) -> None:
    trace = built([("a", 1, None), ("bcdefgh", 1, None), ("a", 1, None)])
    row = run_job([trace], Job(0, policy, 6, ReplayMode.NODES))
    assert (row.requests, row.refused_requests, row.hit_blocks) == (2, 1, 1)
