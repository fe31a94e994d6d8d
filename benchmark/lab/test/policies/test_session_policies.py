"""Policies that follow sessions, on examples worked by hand and against brute force."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance_lab.policies.continuum import ContinuumPolicy
from sgl_importance_lab.policies.lru import LruPolicy
from sgl_importance_lab.policies.session_requests import SessionRequests
from sgl_importance_lab.policies.turn_count import TurnCountPolicy
from sgl_importance_lab.policies.workload_aware import WorkloadAwarePolicy
from sgl_importance_lab.replay.cache import replay_objects, replay_tree
from sgl_importance_lab.replay.trace import Trace, TraceBuilder
from sgl_importance_lab.replay.trace_turns import session_requests

from support.drivers.published import Watched, tree_trace

UNKNOWN, TOOL_CALL, END_OF_TURN = AnswerEnd.UNKNOWN, AnswerEnd.TOOL_CALL, AnswerEnd.END_OF_TURN
TOKENS = 100_000  # of a block, so that computing one takes ten seconds
paths = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=40)
seconds = st.lists(st.integers(0, 4).map(float), min_size=101, max_size=130)


def answered(requests: list[tuple[str, float, AnswerEnd]]) -> Trace:
    """A trace of texts with a block for each letter, when they come, and how their answers end."""
    builder = TraceBuilder("answered", TOKENS)
    for text, second, end in requests:
        blocks = [text[: depth + 1] for depth in range(len(text))]
        builder.add(blocks, input_tokens=TOKENS * len(text), output_tokens=1, seconds=second, answer_end=end)
    return builder.build()


def continuum_victims(trace: Trace, capacity: int) -> list[int]:
    watched = Watched(ContinuumPolicy(capacity, session_requests(trace)))
    replay_tree(trace, watched)
    return watched.victims


def texts_of(trace: Trace, texts: list[str], blocks: list[int]) -> str:
    """The last letters of blocks, by the order in which the letters first come."""
    letters = [text[: depth + 1] for text in texts for depth in range(len(text))]
    return "".join(list(dict.fromkeys(letters))[block][-1] for block in blocks)


def test_sessions_are_followed_through_the_requests_of_others() -> None:
    requests = session_requests(
        answered([(text, 0.0, TOOL_CALL) for text in ("a", "x", "ab", "xy", "abc", "q")])
    )
    assert requests.before.tolist() == [-1, -1, 0, 1, 2, -1]
    assert requests.turns.tolist() == [1, 1, 2, 2, 3, 1]


@settings(max_examples=60, deadline=None)
@given(paths=paths, capacity=st.integers(1, 12))
def test_continuum_without_tools_is_lru(paths: list[list[int]], capacity: int) -> None:
    trace = tree_trace(paths)
    lru = Watched(LruPolicy(capacity))
    replay_tree(trace, lru)
    assert continuum_victims(trace, capacity) == lru.victims


@pytest.mark.parametrize(("waited", "goes"), [(2.0, "x"), (3.0, "a")])
def test_continuum_pins_what_waits_for_a_tool(waited: float, goes: str) -> None:
    # Computing a takes ten seconds; no tool was seen: pinned for log(10) = 2.3 s, although x came later.
    texts = ["a", "x", "y"]
    ends = [TOOL_CALL, END_OF_TURN, END_OF_TURN]
    trace = answered(list(zip(texts, (0.0, 1.0, waited), ends, strict=True)))
    assert texts_of(trace, texts, continuum_victims(trace, 2)) == goes


def test_continuum_unpins_what_its_session_went_on_without() -> None:
    # a b waits for a tool when its session goes on with a c: b goes, although x was never pinned.
    texts = ["ab", "x", "ac"]
    trace = answered(list(zip(texts, (0.0, 0.1, 0.2), (TOOL_CALL, END_OF_TURN, END_OF_TURN), strict=True)))
    assert texts_of(trace, texts, continuum_victims(trace, 3)) == "b"


@given(seconds, st.floats(0.0, 8.0))
def test_continuum_lives_as_long_as_pays_most(waits: list[float], benefit: float) -> None:
    texts = [chr(ord("A") + turn) for turn in range(len(waits) + 1)]
    clock = np.concatenate(([0.0], np.cumsum(waits)))
    trace = answered([("".join(texts[: i + 1]), float(clock[i]), TOOL_CALL) for i in range(len(texts))])
    policy = ContinuumPolicy(10, session_requests(trace))
    for request in range(trace.num_requests):
        policy.begin_request(request)
    rewards = {ttl: np.mean([wait <= ttl for wait in waits]) * benefit - ttl for ttl in (0.0, *waits)}
    assert rewards[policy.time_to_live(benefit)] == pytest.approx(max(rewards.values()))


def test_continuum_believes_in_a_second_before_it_has_seen_tools() -> None:
    policy = ContinuumPolicy(1, session_requests(answered([("a", 0.0, TOOL_CALL)])))
    assert policy.time_to_live(10.0) == pytest.approx(log(10.0))
    assert policy.time_to_live(0.5) == 0.0


class Checked(ContinuumPolicy):
    """Compares each victim with the lowest of all candidates."""

    def victim(self) -> int:
        blocks = [block for queue in self._queues.values() for block in queue._ranks]
        used = self._last_uses
        lowest = min(blocks, key=lambda block: (self._rank(used[block][0]), used[block]))
        victim = super().victim()
        assert victim == lowest
        return victim


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=6), min_size=10, max_size=30), st.data())
def test_continuum_ranks_all_objects_while_a_request_goes_on(
    asked: list[list[int]], data: st.DataObject
) -> None:
    """A request of objects evicts, and hits what another request left, in any order."""
    builder = TraceBuilder("objects", TOKENS, prefix_tree=False)
    for second, blocks in enumerate(asked):
        end = data.draw(st.sampled_from((TOOL_CALL, END_OF_TURN)))
        builder.add(blocks, input_tokens=TOKENS * len(blocks), seconds=float(second), answer_end=end)
    trace = builder.build()
    replay_objects(trace, Checked(5, session_requests(trace)))


def test_workload_gives_up_the_category_that_does_not_come_back() -> None:
    # Sixty sessions have two turns, a second apart, and never a third: second turns are the ones to give up.
    requests = []
    for number in range(60):
        letter = chr(0x4E00 + number)
        requests += [
            (letter, 2.0 * number, UNKNOWN),
            (letter + "b", 2.0 * number + 1, UNKNOWN),
        ]
    requests += [("z", 120.0, UNKNOWN), ("y", 120.5, UNKNOWN)]
    trace = answered(requests)
    policy = WorkloadAwarePolicy(10, session_requests(trace))
    policy.LEAST_USES = 10
    replay_tree(trace, policy)
    second_turn, first_turn = trace.num_requests - 3, trace.num_requests - 2
    assert policy.chance(second_turn) == 0.0
    assert policy.chance(first_turn) > 0.0
    # 60 of 62 first turns came back, after a second; z has waited for half a second.
    ever = 60 / 62
    late = ever * exp(-0.5)
    soon = 1.0 - exp(-policy._lifespan)
    assert policy.chance(first_turn) == pytest.approx(late * soon / (1.0 - ever + late))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 6))
def test_workload_of_one_category_is_lru(chosen: list[int], capacity: int) -> None:
    trace = answered([(chr(ord("a") + c), float(i), UNKNOWN) for i, c in enumerate(chosen)])
    requests = session_requests(trace)
    alone = SessionRequests(
        requests.blocks,
        requests.offsets,
        requests.seconds,
        requests.tokens,
        requests.called_tool,
        np.full_like(requests.before, -1),
        np.ones_like(requests.turns),
    )
    watched, lru = Watched(WorkloadAwarePolicy(capacity, alone)), Watched(LruPolicy(capacity))
    replay_tree(trace, watched)
    replay_tree(trace, lru)
    assert watched.victims == lru.victims


def test_turn_count_keeps_the_turn_that_goes_on() -> None:
    # Ten sessions end with their second turn: z, which has begun, goes on more likely than y, which has two.
    requests: list[tuple[str, float, AnswerEnd]] = []
    for number in range(10):
        letter = chr(0x4E00 + number)
        requests += [(letter, 2.0 * number, UNKNOWN), (letter + "b", 2.0 * number + 1, UNKNOWN)]
    requests += [(text, 20.0 + 0.1 * i, UNKNOWN) for i, text in enumerate(("z", "y", "yb"))]
    trace = answered(requests)
    policy = TurnCountPolicy(10, session_requests(trace))
    replay_tree(trace, policy)
    begun, second = trace.num_requests - 3, trace.num_requests - 1
    gap = (10 + 0.1) / 11
    assert policy.chance(begun) == pytest.approx(12 / 14 * exp(-0.2 / gap))
    assert policy.chance(second) == pytest.approx(1 / 13)
