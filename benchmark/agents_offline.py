"""What a model that was fitted beforehand gains on recorded coding agents: a reference for the policy.

    pip install --no-deps lightgbm narwhals scipy
    python benchmark/agents_offline.py claude_code_sessions.jsonl.gz --resume

Gradient-boosted trees (LightGBM) say how soon the session of a turn goes on. They know how its answer ended
and how long it was, the prompt's length, the session's last, mean and longest gap, its turns, and how long it
has waited. They are fitted to the even lines of the file and tried on the odd ones, which the policy, that
learns online, sees from an empty estimator. Both rank the same candidates, and both give up first what
sessions went on without; only the estimate of a turn differs. Arms:

- ``offline, when``: the turn that is expected back last loses its tail first (the mean logarithm of the time,
  of which those who never came back have the longest);
- ``offline, rate``: the one that is least likely to be back within ten minutes.

Blocks that sessions share are ranked by reuses per request, so what a model says per second is multiplied by
the recent seconds per request, as the policy's own estimate is. What a model says is not the policy's index
all the same, so shared blocks may gain or lose by its scale: in the arms that end in ``by turns alone`` they
are ranked by the turn that was the last to visit them, and nothing but the order of turns counts.

``gap`` is the part of the way from LRU to the optimum, as in ``benchmark/agents.py``; ``beside_importance``,
the difference from the policy's in the same order of sessions. Both have 95 % intervals over the orders.
Models by turns alone are compared with the policy by turns alone, and that with the policy as it is. With
``--better-only`` the policy and ``offline, when`` are replayed and no other arm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from agents import BLOCK_TOKENS, FRACTIONS
from intervals import interval
from results import RESULTS, print_rows, rows_so_far, write_results

from sgl_importance.reuse.estimator import DECAY, REFRESH_INTERVAL
from sgl_importance.reuse.life_table import BUCKET_STARTS
from sgl_importance.reuse.turns import NUM_TURN_BUCKETS
from sgl_importance_lab.policies.session_requests import NO_REQUEST
from sgl_importance_lab.replay.compiled.fast_lru import replay_lru
from sgl_importance_lab.replay.compiled.fast_turns import replay_estimated, replay_turns
from sgl_importance_lab.replay.formats.kv_cache_tester import Session, merge_sessions, read_sessions
from sgl_importance_lab.replay.formats.line_reader import refuse_bad_record
from sgl_importance_lab.replay.policy_registry import IMPORTANCE, OPTIMUM
from sgl_importance_lab.replay.replay_runner import ReplayMode, choose_replay
from sgl_importance_lab.replay.sessions import BlockFacts, block_facts
from sgl_importance_lab.replay.trace import NO_PARENT, Trace
from sgl_importance_lab.replay.trace_turns import GONE_ON, TraceTurns, session_requests

FloatArray = npt.NDArray[np.float64]
AGES = BUCKET_STARTS[:NUM_TURN_BUCKETS].astype(np.float64)
NEVER = 86_400.0
"""Seconds in which those who do not come back are believed to."""
SOON = 600.0
SAMPLES = 4
"""Ages of each turn that the model is fitted to."""
FIT_SEEDS = 3
WHEN, RATE = "offline, when", "offline, rate"
BY_TURNS_ALONE = ", by turns alone"
PARAMETERS = {
    "num_leaves": 31,
    "learning_rate": 0.05,
    "min_data_in_leaf": 200,
    "seed": 0,
    "deterministic": True,
    "num_threads": 1,
    "verbose": -1,
}
ROUNDS = 200


def facts_of_turns(trace: Trace) -> FloatArray:
    """What is known of each turn when it begins; float64 [requests, facts]."""
    requests = session_requests(trace)
    facts = np.full((trace.num_requests, 7), -1.0)
    gaps: list[list[float]] = []  # of the request's session so far
    for request in range(trace.num_requests):
        before = int(requests.before[request])
        known: list[float] = []
        if before != NO_REQUEST:
            known = [*gaps[before], float(trace.seconds[request] - trace.seconds[before])]
        gaps.append(known)
        rhythm = (known[-1], float(np.mean(known)), max(known)) if known else (-1.0, -1.0, -1.0)
        facts[request] = (
            trace.answer_ends[request],
            trace.output_tokens[request],
            trace.input_tokens[request],
            *rhythm,
            requests.turns[request],
        )
    return facts


def waits(trace: Trace) -> FloatArray:
    """Seconds until each turn goes on, infinite where it does not; float64 [requests]."""
    requests = session_requests(trace)
    found = np.full(trace.num_requests, np.inf)
    after = np.flatnonzero(requests.before != NO_REQUEST)
    before = requests.before[after]
    found[before] = trace.seconds[after] - trace.seconds[before]
    return found


def fit(traces: Sequence[Trace]) -> dict[str, Any]:
    """A model for each arm, of turns at ages that they got to."""
    import lightgbm

    rng = np.random.default_rng(0)
    inputs, remaining = [], []
    for trace in traces:
        facts, waited = facts_of_turns(trace), waits(trace)
        for _ in range(SAMPLES):
            ages = AGES[rng.integers(0, NUM_TURN_BUCKETS, len(waited))]
            ages[rng.random(len(ages)) < 1 / SAMPLES] = 0.0
            open_still = waited > ages
            inputs.append(np.column_stack((facts, ages))[open_still])
            remaining.append((waited - ages)[open_still])
    x, left = np.concatenate(inputs), np.concatenate(remaining)
    when = lightgbm.train(
        {**PARAMETERS, "objective": "regression"},
        lightgbm.Dataset(x, np.log2(1.0 + np.minimum(left, NEVER)), categorical_feature=[0]),
        ROUNDS,
    )
    soon = lightgbm.train(
        {**PARAMETERS, "objective": "binary"},
        lightgbm.Dataset(x, left <= SOON, categorical_feature=[0]),
        ROUNDS,
    )
    return {WHEN: when, RATE: soon}


class OfflineEstimator:
    """What a model said of all turns, and the recent seconds per request as ``TurnEstimator`` counts them.

    Args:
        index: returns per second, higher for what is to stay; float64 [requests, NUM_TURN_BUCKETS].
    """

    def __init__(self, index: FloatArray) -> None:
        self.index = index
        self.seconds_per_request = 1.0
        self._requests = 0
        self._now = 0.0
        self._recent_requests = self._recent_seconds = DECAY

    def advance(self, seconds: float) -> None:
        """A request came."""
        self._recent_requests += 1.0
        self._recent_seconds += seconds - self._now
        self._now = seconds
        self._requests += 1
        if self._requests % REFRESH_INTERVAL == 0:
            self._recent_requests *= DECAY
            self._recent_seconds *= DECAY
            self.seconds_per_request = self._recent_seconds / self._recent_requests


class OfflineTurns(TraceTurns):
    """Turns of a trace, each of a class of its own: what a model says of it at each age.

    Args:
        trace: see ``TraceTurns``.
        facts: likewise.
        index: see ``OfflineEstimator``.
    """

    def __init__(self, trace: Trace, facts: BlockFacts, index: FloatArray) -> None:
        super().__init__(trace, facts)
        self.estimator = OfflineEstimator(index)

    def begin_request(self, request: int) -> None:
        self.estimator.advance(float(self._trace.seconds[request]))
        before = int(self.before[request])
        self.since[request], self.classes[request] = self._trace.seconds[request], request
        if before != NO_PARENT:
            self.classes[before] = GONE_ON


def index_of(model: Any, arm: str, facts: FloatArray) -> FloatArray:
    """What a model says of each turn at the start of each bucket of ages, as returns per second."""
    index = np.empty((len(facts), NUM_TURN_BUCKETS))
    for bucket, age in enumerate(AGES):
        said = model.predict(np.column_stack((facts, np.full(len(facts), age))), num_threads=1)
        index[:, bucket] = np.exp2(-said) if arm == WHEN else said / SOON
    return index


def main(
    sessions_file: Annotated[Path, typer.Argument(help="claude_code_sessions.jsonl.gz, or a file like it.")],
    alive_at_a_time: Annotated[str, typer.Option("--alive", help="Comma-separated.")] = "10,20,40,80",
    capacities: Annotated[str, typer.Option(help="Comma-separated parts of the unique blocks.")] = "",
    seeds: Annotated[int, typer.Option(min=1, max=10, help="Orders in which sessions begin.")] = 1,
    better_only: Annotated[bool, typer.Option(help="The policy and the better model, nothing else.")] = False,
    resume: Annotated[bool, typer.Option(help="Leave out what the JSON has.")] = False,
    out: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "agents_offline.json",
) -> None:
    """Measures and writes the results."""
    fractions = [float(each) for each in capacities.split(",")] if capacities else FRACTIONS
    _, sessions = read_sessions(sessions_file, BLOCK_TOKENS, refuse_bad_record)
    rows = rows_so_far(out) if resume else []
    models: dict[str, Any] = {}
    for alive in map(int, alive_at_a_time.split(",")):
        if {row["capacity"] for row in rows if row["alive"] == alive} >= set(fractions):
            continue
        models = models or fit([_merged(sessions, 0, 20, seed) for seed in range(FIT_SEEDS)])
        rates: dict[tuple[float, str], list[float]] = {}
        for seed in range(seeds):
            trace = _merged(sessions, 1, alive, seed)
            facts, known = block_facts(trace), facts_of_turns(trace)
            indices = {
                arm: index_of(model, arm, known)
                for arm, model in models.items()
                if arm == WHEN or not better_only
            }
            for fraction in fractions:
                capacity = max(1, int(fraction * trace.num_blocks))
                counts = {
                    "lru": replay_lru(trace, capacity),
                    OPTIMUM: choose_replay(OPTIMUM, ReplayMode.TREE)(trace, capacity),
                    IMPORTANCE: replay_turns(trace, capacity, facts),
                }
                estimates: dict[str, Callable[[], TraceTurns]] = {
                    arm: partial(OfflineTurns, trace, facts, index) for arm, index in indices.items()
                }
                for arm, make_turns in estimates.items():
                    counts[arm] = replay_estimated(trace, capacity, facts, make_turns())
                alone = {} if better_only else {IMPORTANCE: partial(TraceTurns, trace, facts), **estimates}
                for arm, make_turns in alone.items():
                    turns = make_turns()
                    turns.is_shared[:] = False
                    counts[arm + BY_TURNS_ALONE] = replay_estimated(trace, capacity, facts, turns)
                for arm, count in counts.items():
                    rates.setdefault((fraction, arm), []).append(count.hit_blocks / trace.num_accesses)
        gaps: dict[tuple[float, str], FloatArray] = {}
        for (fraction, arm), values in rates.items():
            lru, optimum = (np.array(rates[fraction, name]) for name in ("lru", OPTIMUM))
            gaps[fraction, arm] = (np.array(values) - lru) / (optimum - lru)
        for (fraction, arm), values in rates.items():
            gap, low, high = interval(gaps[fraction, arm].tolist())
            is_offline_alone = arm in (WHEN + BY_TURNS_ALONE, RATE + BY_TURNS_ALONE)
            policy = IMPORTANCE + BY_TURNS_ALONE if is_offline_alone else IMPORTANCE
            beside = interval((gaps[fraction, arm] - gaps[fraction, policy]).tolist())
            rows.append(
                {
                    "alive": alive,
                    "capacity": fraction,
                    "policy": arm,
                    "hit_rate": float(np.mean(values)),
                    "gap": gap,
                    "low": low,
                    "high": high,
                    "gaps": [round(each, 6) for each in gaps[fraction, arm].tolist()],
                    "beside_importance": beside[0],
                    "beside_low": beside[1],
                    "beside_high": beside[2],
                    "seeds": seeds,
                }
            )
        write_results("agents_offline", rows, out=out)
    print_rows("Sessions of odd lines", [{**row, "gaps": str(row["gaps"])} for row in rows])
    typer.echo(f"written to {out}")


def _merged(sessions: Sequence[Session], parity: int, alive: int, seed: int) -> Trace:
    chosen = [session for session in sessions if session.line % 2 == parity]
    return merge_sessions(f"{alive} alive", BLOCK_TOKENS, chosen, alive, seed, refuse_bad_record)


if __name__ == "__main__":
    typer.run(main)
