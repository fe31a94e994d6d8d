"""H3: does choosing pages together with where they are beat choosing first and keeping cleverly?"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sgl_importance.terminal import counted
from sgl_importance_lab.replay.policy_registry import OPTIMUM
from sgl_importance_lab.replay.replay_runner import ReplayError, run_jobs
from sgl_importance_lab.replay.residency.page_replay import (
    INDEPENDENT_POLICIES,
    PageCounts,
    PageReplayError,
    Selection,
    check_selection,
    longest_context,
    run_policy,
)
from sgl_importance_lab.replay.residency.page_steps import PageRecording
from sgl_importance_lab.study.statistics import Estimate, Floats, bootstrap
from sgl_importance_lab.study.study_report import OF_THESE_MODELS, Finding, StudyError, draw

# Chosen before the first run: what the prototype's numbers were taken at.
SELECTED, SLOTS = 0.1, 0.2
SAVED, COVERED = 0.3, 0.99
TOKEN_PERCENTILES = (50, 95, 99)
"""Of the pages that a token waits for, in all layers and heads; at one speed of copies, of its wait."""
CLAIM = (
    "choosing pages with a preference for those on the device loads at least 30 % fewer than the best "
    "residency behind an independent choice, at 0.99 of its attention mass"
)


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy of residency and the bias of the choice on what is resident; 0: the choice is independent."""

    policy: str
    bias: float = 0.0

    def __str__(self) -> str:
        return f"{self.policy}, bias {self.bias:g}" if self.bias else self.policy


JOINT = Arm("ema", 1.0)
INDEPENDENT = tuple(Arm(policy) for policy in INDEPENDENT_POLICIES)
ARMS = (*INDEPENDENT, Arm("random"), Arm(OPTIMUM), Arm("lru", 1.0), JOINT, Arm("lru", 3.0), Arm("ema", 3.0))


@dataclass(frozen=True, slots=True)
class _Job:
    recording: int
    arm: Arm


def _run(recordings: Sequence[PageRecording], job: _Job) -> PageCounts:
    recording = recordings[job.recording]
    slots = max(1, int(SLOTS * longest_context(recording)))
    return run_policy(recording, job.arm.policy, slots, Selection(SELECTED, job.arm.bias))


def run_arms(recordings: Sequence[PageRecording], processes: int) -> dict[Arm, list[PageCounts]]:
    """Counts of each arm, recording by recording.

    Raises:
        StudyError: the lists are too short, or a process died.
    """
    jobs = [_Job(at, arm) for at in range(len(recordings)) for arm in ARMS]
    found: dict[int, PageCounts] = {}
    try:
        for recording in recordings:
            check_selection(recording, Selection(SELECTED))
        with counted("replaying", len(jobs)) as advance:
            for index, counts in run_jobs(_run, recordings, jobs, processes):
                found[index] = counts
                advance()
    except (PageReplayError, ReplayError) as error:
        raise StudyError(str(error)) from error
    by_arm: dict[Arm, list[PageCounts]] = defaultdict(list)
    for index, job in enumerate(jobs):
        by_arm[job.arm].append(found[index])
    return by_arm


def saved_loads(pairs: Floats) -> float:
    """1 - loads of the first / loads of the second; float64 [requests, 2]."""
    first, second = pairs.sum(axis=0)
    return float(1 - first / max(second, 1e-12))


def study_h3(
    recordings: Sequence[PageRecording], *, figure: Path | None = None, processes: int | None = None
) -> Finding:
    """
    Raises:
        StudyError: nothing was loaded by any independent choice, or the lists are too short.
    """
    by_arm = run_arms(recordings, processes or os.cpu_count() or 1)
    best = min(INDEPENDENT, key=lambda arm: _total(by_arm[arm], "loaded"))
    if not _total(by_arm[best], "loaded"):
        raise StudyError(f"{best} loads nothing: record longer contexts, or more documents")
    value = bootstrap(_pairs(by_arm[JOINT], by_arm[best], "loaded"), saved_loads)
    covered = bootstrap(_pairs(by_arm[JOINT], by_arm[best], "mass"), lambda pairs: 1 - saved_loads(pairs))
    rows = [
        row for at in range(len(recordings)) for row in _rows(recordings[at], by_arm, at, by_arm[Arm("lru")])
    ]
    if figure is not None:
        draw(figure, [("Pages loaded of those read", lambda axis: _paint(axis, rows))])
    contexts = sorted(longest_context(each) * each.page_size for each in recordings)
    return Finding(
        study="h3",
        claim=CLAIM,
        value=value,
        verdict=verdict(value, covered),
        notes=(
            f"value: share of loads that {JOINT} saves beside {best}, the best of {len(INDEPENDENT)} "
            f"independent policies on these recordings; {SELECTED:.0%} of the pages read by each layer and "
            f"head, {SLOTS:.0%} of the longest context kept; requests are the resampled units",
            f"covered attention mass, joint / independent: {covered}",
            f"longest contexts of {', '.join(f'{tokens:,}' for tokens in contexts)} tokens: the verdict "
            "holds for these lengths only",
            "pages are chosen by true attention, as listed; a selector that estimates it chooses others. "
            "Loads, not latency; and with a bias answers may change, which a replay cannot show",
            OF_THESE_MODELS,
        ),
        rows=tuple(rows),
    )


def verdict(value: Estimate, covered: Estimate) -> str:
    """The conclusion from both intervals."""
    if covered.low < COVERED:
        return f"not supported for these lengths: the joint choice covers {covered} of the attention"
    if value.low > SAVED:
        return f"supported for these lengths: more than {SAVED:.0%} of the loads are saved"
    if value.high < SAVED:
        return f"refuted for these lengths: less than {SAVED:.0%} of the loads are saved"
    return f"undecided: the interval holds {SAVED:.0%}"


def _total(counts: Sequence[PageCounts], name: str) -> float:
    return float(sum(getattr(each, name).sum() for each in counts))


def _pairs(first: Sequence[PageCounts], second: Sequence[PageCounts], name: str) -> Floats:
    """A quantity of both arms, of every request that read chosen pages; float64 [requests, 2]."""
    return np.concatenate(
        [
            np.stack([getattr(one, name), getattr(other, name)], axis=1)[one.read > 0].astype(np.float64)
            for one, other in zip(first, second, strict=True)
        ]
    )


def _rows(
    recording: PageRecording, by_arm: dict[Arm, list[PageCounts]], at: int, lru: Sequence[PageCounts]
) -> list[dict[str, Any]]:
    kinds = np.array([request.kind for request in recording.requests])
    kinds_of_events = kinds[[event.request for event in recording.events]]
    rows = []
    for kind in sorted({*kinds[lru[at].read > 0].tolist()}):
        of_kind = kinds == kind
        for arm, counts in by_arm.items():
            of_arm = counts[at]
            read, loaded = int(of_arm.read[of_kind].sum()), int(of_arm.loaded[of_kind].sum())
            by_token = of_arm.loaded_by_event[(kinds_of_events == kind) & (of_arm.loaded_by_event >= 0)]
            rows.append(
                {
                    "workload": f"{recording.name}: {kind}",
                    "context": longest_context(recording) * recording.page_size,
                    "policy": arm.policy,
                    "bias": arm.bias,
                    "requests": int((of_kind & (of_arm.read > 0)).sum()),
                    "read": read,
                    "loaded": loaded / max(read, 1),
                    "of lru": loaded / max(int(lru[at].loaded[of_kind].sum()), 1),
                    **{f"p{at}": float(np.percentile(by_token, at)) for at in TOKEN_PERCENTILES},
                    "mass": float(of_arm.mass[of_kind].sum() / max(int(of_arm.heads[of_kind].sum()), 1)),
                }
            )
    return rows


def _paint(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    for arm in ARMS:
        shares = [row["loaded"] for row in rows if Arm(row["policy"], row["bias"]) == arm]
        style = "k_" if arm.policy == OPTIMUM else ("o" if arm.bias else "x")
        axis.plot(range(len(workloads)), shares, style, label=str(arm))
    axis.set_xticks(range(len(workloads)), workloads, fontsize=7, rotation=35, ha="right")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
