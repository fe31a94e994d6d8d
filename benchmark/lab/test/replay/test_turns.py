"""``importance`` by turns: the compiled path counts what the readable one does; what the facts are for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance_lab.replay.cache import replay_tree
from sgl_importance_lab.replay.compiled.fast_importance import replay_importance
from sgl_importance_lab.replay.compiled.fast_lru import replay_lru
from sgl_importance_lab.replay.compiled.fast_turns import replay_turns
from sgl_importance_lab.replay.policy_registry import IMPORTANCE, create_policy
from sgl_importance_lab.replay.replay_runner import ReplayMode, choose_replay
from sgl_importance_lab.replay.sessions import block_facts
from sgl_importance_lab.replay.trace import NO_PARENT, Trace, TraceBuilder
from sgl_importance_lab.replay.trace_turns import GONE_ON, TraceTurns, ranks_by_turns
from sgl_importance_lab.replay.turn_replay import TurnReplayPolicy

BLOCK = 16
_requests = st.tuples(
    st.integers(0, 200),
    st.integers(0, 30),
    st.integers(0, 8),
    st.integers(0, 400),
    st.sampled_from(AnswerEnd),
)


def random_trace(seeds: list[tuple[int, int, int, int, AnswerEnd]]) -> Trace:
    """Sessions that grow, branch and repeat: (session, how far to follow it, new blocks, gap, end)."""
    builder = TraceBuilder("random", BLOCK)
    sessions: list[list[int]] = [[0]]
    fresh, seconds = 1, 0.0
    for which, follow, new, gap, end in seeds:
        base = sessions[which % len(sessions)]
        # Half of the requests follow a session to its end.
        path = (base if which % 2 else base[: 1 + follow % len(base)]) + list(range(fresh, fresh + new))
        fresh += new
        seconds += gap / 8
        sessions.append(path)
        tokens = len(path) * BLOCK
        builder.add(path, input_tokens=tokens, output_tokens=7 * follow, seconds=seconds, answer_end=end)
    return builder.build()


@settings(max_examples=60, deadline=None)
@given(st.lists(_requests, min_size=1, max_size=150), st.integers(1, 60))
def test_the_compiled_path_counts_what_the_readable_one_does(seeds: list, capacity: int) -> None:
    trace = random_trace(seeds)
    trace.check_integrity()
    assert replay_turns(trace, capacity) == replay_tree(trace, TurnReplayPolicy(capacity, trace))


def test_turns_rank_where_an_end_is_known() -> None:
    history = [(i * 7 % 40, i % 9, i % 5, i % 60, AnswerEnd.UNKNOWN) for i in range(200)]
    unknown = random_trace(history)
    assert not ranks_by_turns(unknown)
    assert not isinstance(create_policy(IMPORTANCE, 30, unknown), TurnReplayPolicy)
    replay = choose_replay(IMPORTANCE, ReplayMode.TREE)
    assert replay(unknown, 30) == replay_importance(unknown, 30)
    assert replay_turns(unknown, 30) == replay_importance(unknown, 30), "turns that rank nothing"
    known = random_trace([*history[:-1], (*history[-1][:4], AnswerEnd.ABORT)])
    assert isinstance(create_policy(IMPORTANCE, 30, known), TurnReplayPolicy)
    assert replay(known, 30) == replay_turns(known, 30)
    assert replay_turns(known, 30) != replay_importance(known, 30)


def conversations(requests: int, *, grow: bool) -> Trace:
    """Sixteen sessions that ask in turn, of which nobody tells how answers end."""
    builder = TraceBuilder("conversations", BLOCK)
    for step in range(requests):
        session, turn = step % 16, step // 16
        path = [(session, block) for block in range(20 + grow * turn)]
        builder.add(path, input_tokens=len(path) * BLOCK, seconds=float(step))
    return builder.build()


def test_turns_rank_in_conversations_without_ends() -> None:
    growing, repeated = conversations(400, grow=True), conversations(400, grow=False)
    assert ranks_by_turns(growing)
    assert not ranks_by_turns(repeated)
    replay = choose_replay(IMPORTANCE, ReplayMode.TREE)
    readable = replay_tree(growing, TurnReplayPolicy(120, growing))
    assert replay(growing, 120) == replay_turns(growing, 120) == readable
    assert replay(growing, 120) != replay_importance(growing, 120)


def relations(*paths: list[int]) -> tuple[list[int], list[bool]]:
    """Turns that are over after these requests, and whether each block of the last one is shared."""
    builder = TraceBuilder("paths", BLOCK)
    for path in paths:
        builder.add(path, input_tokens=len(path) * BLOCK)
    trace = builder.build()
    turns = TraceTurns(trace, block_facts(trace))
    for request in range(trace.num_requests):
        turns.begin_request(request)
    over = [request for request in range(trace.num_requests) if turns.classes[request] == GONE_ON]
    return over, turns.is_shared[trace.offsets[-2] :].tolist()


def test_a_session_goes_on_and_another_one_parts_from_it() -> None:
    assert relations([1, 2, 3, 4], [1, 2, 3, 4, 5])[0] == [0]
    assert relations([1, 2, 3, 4], [1, 2, 3, 9])[0] == [0], "an edit of the last block"
    assert relations([1, 2, 3, 4], [1, 9, 8])[0] == [], "another session behind the same first block"
    assert relations([1, 2, 3, 4], [1, 9, 8])[1] == [True, False, False]
    assert relations([1, 2, 3, 4], [9])[0] == []
    assert NO_PARENT == GONE_ON == -1


def agents(requests: int) -> Trace:
    """Sixteen agents whose tools answer after 10 s and ten times as many people who never do."""
    builder = TraceBuilder("agents", BLOCK)
    fresh = 1
    paths: dict[int, list[int]] = {}
    for step in range(requests):
        agent = step // 2 % 16
        if step % 2:
            path = list(range(fresh, fresh + 10))
            end = AnswerEnd.END_OF_TURN
        else:
            path = [*paths.get(agent, range(fresh, fresh + 10)), fresh + 10]
            path = path if len(path) < 40 else list(range(fresh, fresh + 10))
            paths[agent] = path
            end = AnswerEnd.TOOL_CALL
        fresh += 11
        builder.add(path, input_tokens=len(path) * BLOCK, seconds=step * 10 / 32, answer_end=end)
    return builder.build()


def test_a_call_of_a_tool_outlives_the_end_of_a_turn() -> None:
    trace = agents(3000)
    # Room for the agents, but not for what is asked between two requests of one of them.
    told, lru = replay_turns(trace, 500), replay_lru(trace, 500)
    assert told.hit_blocks > 2 * lru.hit_blocks
    everything = replay_lru(trace, trace.num_blocks).hit_blocks
    assert told.hit_blocks > 0.9 * everything


def test_a_prefix_that_sessions_share_outlives_them() -> None:
    """Sessions of one turn behind one prefix: what they end with says nothing about the prefix."""
    builder = TraceBuilder("shared", BLOCK)
    fresh = 100
    for step in range(600):
        path = [*range(20), *range(fresh, fresh + 5)] if step % 4 == 0 else list(range(fresh, fresh + 30))
        fresh += 30
        end = AnswerEnd.END_OF_TURN if step % 4 == 0 else AnswerEnd.TOOL_CALL
        builder.add(path, input_tokens=len(path) * BLOCK, seconds=float(step), answer_end=end)
    trace = builder.build()
    assert replay_turns(trace, 80).hit_blocks > 0.9 * 20 * 150
