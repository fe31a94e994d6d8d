"""Replays of recorded agents: the unit of a model that was fitted beforehand, and requests that overlap."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.turns import TurnEstimator
from sgl_importance_lab.replay.cache import replay_tree
from sgl_importance_lab.replay.compiled.fast_turns import replay_estimated, replay_turns
from sgl_importance_lab.replay.sessions import block_facts
from sgl_importance_lab.replay.trace import Trace, TraceBuilder
from sgl_importance_lab.replay.trace_turns import TraceTurns

FOLDER = Path(__file__).parents[2] / "benchmark"
BLOCK = 512


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The scripts, with what they import from their own folder; others have some of the same names."""
    own = ("agents", "agents_offline", "agents_served", "agents_restart", "agents_admission", "tier_chain")
    names = ("results", "intervals", *own)
    monkeypatch.syspath_prepend(str(FOLDER))
    before = {name: sys.modules.pop(name, None) for name in names}
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def branching_sessions(requests: int = 1500) -> Trace:
    """Sessions that share one of a few beginnings, take turns by chance, and end; 7 seconds to a request."""
    dice, builder = random.Random(0), TraceBuilder("branching", BLOCK)
    beginnings = [[("shared", kind, block) for block in range(4)] for kind in range(6)]
    sessions: list[list[Any]] = []
    for request in range(requests):
        if len(sessions) < 8:
            sessions.append([*dice.choice(beginnings)])
        session = dice.choice(sessions)
        session += [(request, block) for block in range(dice.randint(1, 3))]
        builder.add(
            session,
            input_tokens=len(session) * BLOCK,
            output_tokens=dice.choice((20, 200, 2000)),
            seconds=7.0 * request,
            answer_end=dice.choice((AnswerEnd.TOOL_CALL, AnswerEnd.END_OF_TURN)),
        )
        if len(session) > 20:
            sessions.remove(session)
    return builder.build()


class _Fixed(TraceTurns):
    """The policy's own turns, of which the index is known beforehand and no departure is noted."""

    def __init__(self, trace: Trace, index: Any) -> None:
        super().__init__(trace, block_facts(trace))
        self._index = index
        self.estimator.departed = lambda turn: None  # type: ignore[method-assign]

    def begin_request(self, request: int) -> None:
        super().begin_request(request)
        self.estimator._index = self._index


def test_a_model_that_says_what_the_policy_knows_evicts_as_it_does(modules: SimpleNamespace) -> None:
    trace = branching_sessions()
    facts = block_facts(trace)
    learnt = TraceTurns(trace, facts)
    for request in range(trace.num_requests):
        learnt.begin_request(request)
    index = learnt.estimator.index
    classes, turns = [], _Fixed(trace, index)
    for request in range(trace.num_requests):
        turns.begin_request(request)
        classes.append(int(turns.classes[request]))
    assert turns.is_shared.any()

    def offline(*, seconds_per_request: float | None = None) -> Any:
        made = modules.agents_offline.OfflineTurns(trace, facts, index[classes])
        if seconds_per_request is not None:
            made.estimator = SimpleNamespace(
                index=index[classes], seconds_per_request=seconds_per_request, advance=lambda seconds: None
            )
        return made

    capacities = range(20, 120, 10)
    policy = [replay_estimated(trace, size, facts, _Fixed(trace, index)) for size in capacities]
    assert [replay_estimated(trace, size, facts, offline()) for size in capacities] == policy
    in_seconds = [
        replay_estimated(trace, size, facts, offline(seconds_per_request=1.0)) for size in capacities
    ]
    assert in_seconds != policy, "the unit does not matter on this trace: nothing was tested"


def test_seconds_per_request_are_the_estimators(modules: SimpleNamespace) -> None:
    trace = branching_sessions(200)
    policy = TraceTurns(trace, block_facts(trace))
    offline = modules.agents_offline.OfflineEstimator(np.zeros(0))
    for request in range(trace.num_requests):
        policy.begin_request(request)
        offline.advance(float(trace.seconds[request]))
        assert offline.seconds_per_request == policy.estimator.seconds_per_request
    assert offline.seconds_per_request == pytest.approx(7.0, rel=0.05)


def test_who_is_told_what_is_over_gives_it_up_at_once_and_nothing_else(modules: SimpleNamespace) -> None:
    trace = branching_sessions(400)
    facts = block_facts(trace)
    goes_on = set(modules.agents_offline.session_requests(trace).before.tolist())
    told, policy = modules.agents.ToldWhatIsOver(trace, facts), TraceTurns(trace, facts)
    for request in range(trace.num_requests):
        told.begin_request(request)
        policy.begin_request(request)
        over = np.array([turn not in goes_on for turn in range(request + 1)])
        classes = told.classes[: request + 1]
        assert (classes[over] == modules.agents.GONE_ON).all()
        assert (classes[~over] == policy.classes[: request + 1][~over]).all()
    assert 0 < over.sum() < len(over) / 2


@pytest.mark.parametrize(("arm", "said"), [("WHEN", np.log2(1 + 9)), ("RATE", 60.0)])
def test_what_a_model_says_becomes_returns_per_second(
    modules: SimpleNamespace, arm: str, said: float
) -> None:
    """Back in nine seconds; sixty returns within SOON."""
    script = modules.agents_offline
    model = SimpleNamespace(predict=lambda facts, **_: np.full(len(facts), said))
    assert script.index_of(model, getattr(script, arm), np.zeros((2, 7))) == pytest.approx(0.1)


def test_answers_that_take_time_run_beside_each_other(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, found = modules.agents_served, []

    class Watched(script.ShadowCache):  # type: ignore[misc, name-defined]
        def admit(self, *arguments: Any) -> int:
            found.append(len(self._running))
            return int(super().admit(*arguments))

    monkeypatch.setattr(script, "ShadowCache", Watched)
    trace = branching_sessions(300)
    job = script.Job(0, "importance", 100)
    at_once = script.hits([trace], job)
    assert found == [0] * trace.num_requests
    found.clear()
    in_time = script.hits([trace], job, 50.0)
    assert max(found) > 1
    assert in_time != at_once
    assert script.load(trace, 50.0)[0] == pytest.approx(np.mean(found))
    assert script.load(trace, None)[0] == 0


def test_vllm_finds_as_much_as_lru_where_all_fits_and_the_beginnings_of_texts_where_not(
    modules: SimpleNamespace,
) -> None:
    script, trace = modules.agents_served, branching_sessions(300)
    everything = script.Job(0, script.VLLM, 4 * trace.num_blocks + 100)
    assert script.hits([trace], everything) == script.hits([trace], replace(everything, policy=script.LRU))
    small = script.Job(0, script.VLLM, 100)
    assert 0 < script.hits([trace], small) < script.hits([trace], everything)


def test_requests_end_when_their_answers_do(modules: SimpleNamespace) -> None:
    builder = TraceBuilder("four", BLOCK)
    for seconds, tokens in ((0.0, 100), (1.0, 25), (2.0, 1000), (2.5, 0)):
        builder.add([seconds], input_tokens=BLOCK, output_tokens=tokens, seconds=seconds)
    trace = builder.build()
    begin, end = False, True
    # They end at 2.5, 2, 22.5 and 3 seconds: what ends when another comes has ended.
    in_time = [(0, begin), (1, begin), (1, end), (2, begin), (0, end), (3, begin), (3, end), (2, end)]
    assert list(modules.agents_served.events(trace, 50.0)) == in_time
    one_by_one = [(request, is_end) for request in range(4) for is_end in (begin, end)]
    assert list(modules.agents_served.events(trace, None)) == one_by_one
    # Each brings a page: one, two, two and two are held as they come.
    assert modules.agents_served.load(trace, 50.0) == (0.75, 1.75)


def _served_half(modules: SimpleNamespace, trace: Trace) -> Any:
    """A shadow cache that has seen half of the trace."""
    script = modules.agents_restart
    cache = script.ShadowCache(60, BLOCK, script.RestartedRanking(script.UNIFORM_COST, BLOCK, 240))
    for request in range(trace.num_requests // 2):
        pages = [int(block).to_bytes(8, "big") for block in trace.request(request)]
        tokens = len(pages) * BLOCK + 1
        cache.admit(str(request), pages, tokens)
        cache.finish(str(request), pages, tokens + 20, AnswerEnd(int(trace.answer_ends[request])))
    return cache


@pytest.mark.parametrize("arm", ["NO_TURNS", "TABLES", "ALL"])
def test_a_restart_forgets_what_the_arm_does_not_keep(modules: SimpleNamespace, arm: str) -> None:
    script = modules.agents_restart
    cache = _served_half(modules, branching_sessions())
    turns, reuse = cache.ranking.policy.turns, cache.ranking.policy.reuse
    before, hits, is_open = turns.index.copy(), reuse.counts()[0], len(turns._at_risk)
    assert is_open
    script.restart(cache, getattr(script, arm))
    assert cache.used == 0
    np.testing.assert_array_equal(reuse.counts()[0], hits)  # the ledger has these
    unknown = {ghost.turn is None for ghost, _ in cache.ranking._tracker.ghosts._pages.values()}
    assert unknown == ({True} if arm != "ALL" else {False})
    expected = TurnEstimator().index if arm == "NO_TURNS" else before
    np.testing.assert_array_equal(turns.index, expected)
    assert (before != TurnEstimator().index).any()
    assert len(turns._at_risk) == (is_open if arm == "ALL" else 0)
    assert cache.admit("again", [b"a" * 8], BLOCK + 1) == 0
    cache.ranking.policy.check_integrity()


def test_hits_are_counted_behind_the_restart(modules: SimpleNamespace) -> None:
    """Where everything fits, each block is computed once more, and LRU and the policy do alike.

    Prompts end within a block, and answers fill none: else the next turn finds what nobody had computed.
    """
    drawn, script = branching_sessions(600), modules.agents_restart
    none = np.zeros_like(drawn.output_tokens)
    trace = replace(drawn, input_tokens=np.diff(drawn.offsets) * drawn.block_tokens + 1, output_tokens=none)
    found = {script.rates([trace], script.Job(0, arm, 10_000)) for arm in script.ARMS}
    ((hour, rest),) = found
    blocks = [trace.request(request).tolist() for request in range(300, 600)]
    assert rest == pytest.approx(
        1 - len({block for each in blocks for block in each}) / sum(map(len, blocks))
    )
    assert script.requests_in_hour(trace) == 300  # 7 seconds each
    assert hour == rest
    small = [script.rates([trace], script.Job(0, arm, 60))[1] for arm in script.ARMS]
    assert len(set(small)) == len(small), "no arm differs: nothing was tested"


def test_rules_on_top_change_nothing_at_weight_one(modules: SimpleNamespace) -> None:
    trace, script = branching_sessions(), modules.agents_admission
    facts = block_facts(trace)
    for capacity in (30, 60, 100):
        policy = replay_turns(trace, capacity, facts)
        weighted = script.WeightedTurns(trace, facts, 1.0)
        assert replay_estimated(trace, capacity, facts, weighted) == policy
        assert replay_tree(trace, script.CutSessions(capacity, trace, facts, 1.0)) == policy
        assert len({script.hits([trace], script.Job(0, arm, capacity)) for arm in script.ARMS}) > 5


def test_a_text_that_always_stays_is_found_by_the_next_request(modules: SimpleNamespace) -> None:
    """A prompt twice in a row, each time between prompts that nobody asks for again."""
    builder = TraceBuilder("pairs", BLOCK)
    for number in range(200):
        for _ in range(2):
            text = [(number, block) for block in range(4)]
            tokens, end = 4 * BLOCK, AnswerEnd.TOOL_CALL
            builder.add(text, input_tokens=tokens, output_tokens=9, seconds=float(number), answer_end=end)
    trace, script = builder.build(), modules.agents_admission
    assert script.hits([trace], script.Job(0, "own text first", 4)) == 200 * 4


def test_a_session_that_lost_its_tail_goes_on_losing_or_loses_no_more(modules: SimpleNamespace) -> None:
    trace, script = branching_sessions(), modules.agents_admission
    facts = block_facts(trace)

    class Watched(script.CutSessions):  # type: ignore[misc, name-defined]
        def victim(self) -> int:
            own = {self._visited_by[block] for block in self._candidates - self._shared}
            block = int(super().victim())
            turn = self._visited_by[block]
            if block not in self._shared and self._turns.classes[turn] >= 0:
                chosen.append((turn in cut, bool(own & cut), bool(own - cut)))
            cut.add(turn)
            return block

    for factor, wanted in ((0.0, True), (1e30, False)):
        chosen: list[tuple[bool, bool, bool]] = []
        cut: set[int] = set()
        replay_tree(trace, Watched(60, trace, facts, factor))
        contested = [was_cut for was_cut, has_cut, has_whole in chosen if has_cut and has_whole]
        assert len(contested) > 20
        assert set(contested) == {wanted}


def test_a_row_of_tiers_is_the_mean_over_orders(modules: SimpleNamespace) -> None:
    """With an interval of what each order computes beside LRU in the same order."""

    def row(order: int, policy: str, share: float) -> dict[str, Any]:
        kind = {"trace": "agents", "fraction": 0.02, "order": order, "policy": policy}
        return kind | {"recomputed_share": share, "hit_shares": {"dram": 1 - share}}

    shares = {"lru": (0.2, 0.4), "importance": (0.1, 0.3)}
    rows = [row(order, policy, share) for policy, of in shares.items() for order, share in enumerate(of)]
    lru, ours = modules.tier_chain.mean_over_orders(rows)
    assert (lru["policy"], lru["fraction"], lru["orders"]) == ("lru", 0.02, 2)
    assert lru["recomputed_share"] == pytest.approx(0.3)
    assert ours["hit_shares"] == {"dram": pytest.approx(0.8)}
    mean, low, high = ours["recomputed_over_lru"]
    assert mean == pytest.approx((0.5 + 0.75) / 2)
    assert low < 0.5 < 0.75 < high
    assert lru["recomputed_over_lru"] == (1, 1, 1)
