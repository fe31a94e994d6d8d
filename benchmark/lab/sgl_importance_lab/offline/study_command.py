"""`sgl-importance study` with the study that replays recordings through sglang's tree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track

from sgl_importance_lab.study.cli import Directories, Out, WithFigure, app, run_study
from sgl_importance_lab.study.g import ARMS, FRACTIONS, Replayed, conclude, server_notes
from sgl_importance_lab.study.recording import Recording
from sgl_importance_lab.study.study_report import Finding

if TYPE_CHECKING:
    from sgl_importance.policy.marginal_loss import ImportancePolicy
    from sgl_importance_lab.offline.standalone_cache import CacheKind

__all__ = ["app", "replay_arms"]


def _arm(recording: Recording, arm: str) -> tuple[CacheKind, ImportancePolicy | None]:
    from sgl_importance.policy.marginal_loss import ImportancePolicy
    from sgl_importance_lab.offline.tree_replay import recorded_cost
    from sgl_importance_lab.study.shuffled_policy import ShuffledImportancePolicy

    if arm == "lru":
        return "python-lru", None
    cost = recorded_cost(recording)
    if arm == "shuffled":
        return "importance", ShuffledImportancePolicy(cost)
    return "importance", ImportancePolicy(cost, use_importance=arm == "ours")


def replay_arms(recordings: Sequence[Recording]) -> list[Replayed]:
    """Every arm on every recording at every capacity; a capacity that one request fills is left out."""
    from sgl_importance_lab.offline.tree_replay import TreeReplay, hit_tokens, smallest_capacity

    cells = [
        (recording, fraction, capacity)
        for recording in recordings
        for fraction in FRACTIONS
        if (capacity := round(fraction * len(recording.digests))) >= smallest_capacity(recording)
    ]
    replayed = []
    for recording, fraction, capacity in track(
        cells, "replaying", console=Console(stderr=True), transient=True
    ):
        hits = {}
        for name in ARMS:
            kind, policy = _arm(recording, name)
            replay = TreeReplay(recording, capacity_pages=capacity, kind=kind, policy=policy)
            hits[name] = hit_tokens(replay)
        replayed.append(Replayed(recording, fraction, capacity, hits))
    return replayed


def _study(recordings: Sequence[Recording], figure: Path | None) -> Finding:
    from sgl_importance_lab.offline.tree_replay import fidelity
    from sgl_importance_lab.study.study_report import StudyError

    # What our own policy evicted shaped what was looked at: replay what stock's order recorded.
    source = [r for r in recordings if r.header.options["policy"] == "observe"] or list(recordings)
    replayed = replay_arms(source)
    if not replayed:
        raise StudyError("the longest request fills every capacity: record more requests or shorter ones")
    return conclude(
        replayed,
        servers=server_notes(recordings),
        checks=[fidelity(recording) for recording in source],
        figure=figure,
    )


@app.command("g")
def g_command(directories: Directories, out: Out = Path("."), figure: WithFigure = True) -> None:
    """What importance adds to eviction: ours, ours with g = 1, ours with g shuffled between nodes."""
    run_study("g", directories, out, figure, _study)
