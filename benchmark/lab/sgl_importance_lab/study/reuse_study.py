"""Accuracy of the reuse predictions: Brier score and calibration on a trace, without a cache.

Predictions are prequential (Dawid 1984): each is made before its outcome is known, by an estimator that has
seen the requests up to then, so every outcome is held out. The first half of the trace only teaches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sgl_importance.reuse.estimator import ReuseEstimator
from sgl_importance.reuse.reuse_class import NUM_VISIT_LEVELS, BlockType, Transition
from sgl_importance.terminal import add_texts, plain
from sgl_importance_lab.replay.sessions import BlockFacts, block_facts
from sgl_importance_lab.replay.trace import IntArray, Trace
from sgl_importance_lab.study.statistics import Estimate, bootstrap
from sgl_importance_lab.study.study_report import no_verdict

FloatArray = npt.NDArray[np.float64]
CONSTANT, ONE_CLASS, PAIRS, CLASSES = "constant", "one class", "type x transition", "with visits"
CALIBRATION_BINS = 10


@dataclass(frozen=True, slots=True)
class Arm:
    """The score of one way to predict.

    Attributes:
        name: of the facts that the prediction may depend on.
        classes: classes that occur.
        brier: mean squared error of the predicted probability.
        calibration_error: mean absolute difference of predicted and observed rate over bins of equal count.
    """

    name: str
    classes: int
    brier: float
    calibration_error: float


@dataclass(frozen=True, slots=True)
class ClassCalibration:
    """Predicted and observed reuse of one block type and transition."""

    block_type: str
    transition: str
    predictions: int
    predicted: float
    observed: float


@dataclass(frozen=True, slots=True)
class ReuseFinding:
    """The findings on one trace.

    Attributes:
        horizon: requests within which a reuse counts.
        predictions: number of predictions scored.
        base_rate: share of them that came true.
        arms: constant, one class, pairs and the server's classes, in this order.
        gain: Brier score of one class minus that of the server's classes, with its interval over requests.
        by_pair: calibration of the server's classes by block type and transition.
    """

    trace: str
    horizon: int
    predictions: int
    base_rate: float
    arms: tuple[Arm, ...]
    gain: Estimate
    by_pair: tuple[ClassCalibration, ...]

    @property
    def verdict(self) -> str:
        if said := no_verdict(self.gain):
            return said
        if self.gain.low > 0:
            return "the classes predict better than one class"
        if self.gain.high < 0:
            return "the classes predict worse than one class"
        return "the classes do not predict better than one class on this trace"

    def show(self, console: Console) -> None:
        table = Table(title=plain(f"{self.trace}: reuse within {self.horizon} requests", "table.title"))
        for column in ("prediction by", "classes", "Brier score", "calibration error"):
            table.add_column(column, justify="left" if column == "prediction by" else "right")
        for arm in self.arms:
            add_texts(table, arm.name, str(arm.classes), f"{arm.brier:.4f}", f"{arm.calibration_error:.4f}")
        console.print(table)
        table = Table(title="calibration by class")
        for column in ("block type", "transition"):
            table.add_column(column)
        for column in ("predictions", "predicted", "observed"):
            table.add_column(column, justify="right")
        for row in self.by_pair:
            add_texts(
                table,
                row.block_type,
                row.transition,
                str(row.predictions),
                f"{row.predicted:.3f}",
                f"{row.observed:.3f}",
            )
        console.print(table)
        console.print(f"{self.predictions} predictions, {self.base_rate:.3f} came true")
        console.print(f"Brier score of one class minus ours: {self.gain}\nverdict: {self.verdict}")


def study_reuse(trace: Trace, horizon: int, *, progress: bool = True) -> ReuseFinding:
    """Scores the estimator on the second half of a trace.

    Args:
        trace: requests as paths in a prefix tree.
        horizon: requests within which a reuse counts.
        progress: shows a progress bar.

    Raises:
        ValueError: the trace is shorter than four horizons, or holds independent objects.
    """
    if trace.parents is None:
        raise ValueError(f"{trace.name}: independent objects have neither sessions nor shared prefixes")
    if trace.num_requests < 4:
        raise ValueError(f"{trace.name}: {trace.num_requests} requests are too few: record more")
    if trace.num_requests < 4 * horizon:
        raise ValueError(
            f"{trace.name}: {trace.num_requests} requests cannot judge a horizon of {horizon}: "
            f"lower --horizon to {trace.num_requests // 4}"
        )
    facts = block_facts(trace)
    evidence = np.flatnonzero(facts.is_evidence)
    requests = np.repeat(np.arange(trace.num_requests), np.diff(trace.offsets))[evidence]
    outcomes = _reused_within(trace, horizon)[evidence]
    scored = (requests >= trace.num_requests // 2) & (requests < trace.num_requests - horizon)
    if not scored.any():
        raise ValueError(f"{trace.name}: no request that can be judged has a block: record more")
    classes = {
        ONE_CLASS: np.zeros_like(facts.reuse_classes),
        PAIRS: facts.reuse_classes // NUM_VISIT_LEVELS * NUM_VISIT_LEVELS,
        CLASSES: facts.reuse_classes,
    }
    predicted = {CONSTANT: _running_rate(requests, outcomes, horizon)}
    for name in track(classes, description="predicting", disable=not progress):
        predicted[name] = _predict(trace, facts, classes[name], horizon)[evidence]
    arms = []
    for name, values in predicted.items():
        used = len(np.unique(classes[name][evidence][scored])) if name in classes else 1
        errors = _calibration_error(values[scored], outcomes[scored])
        arms.append(Arm(name, used, float(((values - outcomes)[scored] ** 2).mean()), errors))
    gain = (predicted[ONE_CLASS] - outcomes) ** 2 - (predicted[CLASSES] - outcomes) ** 2
    counts = np.bincount(requests[scored]).astype(np.float64)
    per_request = np.stack([np.bincount(requests[scored], gain[scored]), counts], axis=1)[counts > 0]
    return ReuseFinding(
        trace=trace.name,
        horizon=horizon,
        predictions=int(scored.sum()),
        base_rate=float(outcomes[scored].mean()),
        arms=tuple(arms),
        gain=bootstrap(per_request, _ratio_of_sums),
        by_pair=_by_pair(facts, evidence[scored], predicted[CLASSES][scored], outcomes[scored]),
    )


def _reused_within(trace: Trace, horizon: int) -> FloatArray:
    """1 where the block is asked for again within ``horizon`` requests, else 0; float64 [accesses]."""
    requests = np.repeat(np.arange(trace.num_requests), np.diff(trace.offsets))
    order = np.lexsort((requests, trace.blocks))
    gap = np.full(trace.num_accesses, trace.num_requests + horizon)
    same = trace.blocks[order[1:]] == trace.blocks[order[:-1]]
    gap[order[:-1][same]] = (requests[order[1:]] - requests[order[:-1]])[same]
    return (gap <= horizon).astype(np.float64)


def _running_rate(requests: IntArray, outcomes: FloatArray, horizon: int) -> FloatArray:
    """Share of outcomes that were known when each prediction was made; 1/2 before the first."""
    sums, counts = np.bincount(requests, outcomes), np.bincount(requests)
    known_sums = np.concatenate((np.zeros(horizon + 1), np.cumsum(sums)))
    known_counts = np.concatenate((np.zeros(horizon + 1), np.cumsum(counts)))
    return np.asarray((known_sums[requests] + 1.0) / (known_counts[requests] + 2.0), dtype=np.float64)


def _ratio_of_sums(parts: FloatArray) -> float:
    return float(parts[:, 0].sum() / parts[:, 1].sum())


def _predict(trace: Trace, facts: BlockFacts, classes: IntArray, horizon: int) -> FloatArray:
    """P(reuse within the horizon) where a block is evidence, from its past only; float64 [accesses]."""
    reuse = ReuseEstimator()
    predictions = np.zeros(trace.num_accesses)
    intervals: dict[int, tuple[int, int]] = {}
    cached: dict[int, float] = {}
    version = -1
    for request in range(trace.num_requests):
        clock = reuse.tick()
        if reuse.version != version:
            version = reuse.version
            cached.clear()
        for access in range(int(trace.offsets[request]), int(trace.offsets[request + 1])):
            block = int(trace.blocks[access])
            interval = intervals.pop(block, None)
            if interval is not None:
                reuse.hit(*interval)
            if facts.is_evidence[access]:
                reuse_class = int(classes[access])
                intervals[block] = (reuse_class, clock)
                reuse.began(reuse_class)
                if reuse_class not in cached:
                    cached[reuse_class] = reuse.probability_within(reuse_class, 1, horizon)
                predictions[access] = cached[reuse_class]
    return predictions


def _calibration_error(predicted: FloatArray, outcomes: FloatArray) -> float:
    order = np.argsort(predicted, kind="stable")
    bins = [part for part in np.array_split(order, CALIBRATION_BINS) if len(part)]
    differences = [abs(float(predicted[part].mean() - outcomes[part].mean())) * len(part) for part in bins]
    return sum(differences) / len(predicted)


def _by_pair(
    facts: BlockFacts, accesses: IntArray, predicted: FloatArray, outcomes: FloatArray
) -> tuple[ClassCalibration, ...]:
    rows = []
    pairs = facts.block_types[accesses].astype(np.int64) * len(Transition) + facts.transitions[accesses]
    for pair in np.unique(pairs):
        chosen = pairs == pair
        rows.append(
            ClassCalibration(
                BlockType(int(pair) // len(Transition)).name.lower(),
                Transition(int(pair) % len(Transition)).name.lower(),
                int(chosen.sum()),
                float(predicted[chosen].mean()),
                float(outcomes[chosen].mean()),
            )
        )
    return tuple(rows)
