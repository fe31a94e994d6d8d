"""`sgl-importance replay --pages`: recorded page lists through the policies of residency."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from sgl_importance.observe.trace.reader import TraceError
from sgl_importance.terminal import counted, fail, interrupted, plain, show
from sgl_importance_lab.replay.policy_registry import OPTIMUM
from sgl_importance_lab.replay.ray_cluster import RayCluster
from sgl_importance_lab.replay.replay_runner import ReplayError, run_jobs
from sgl_importance_lab.replay.residency.page_replay import (
    PAGE_POLICIES,
    PageReplayError,
    Selection,
    check_selection,
    longest_context,
)
from sgl_importance_lab.replay.residency.page_report import PageJob, pages_table, run_page_job
from sgl_importance_lab.replay.residency.page_steps import PageRecording, load_page_steps


def parse_page_policies(text: str) -> list[str]:
    """Names of a comma-separated list, each once; fails on one that is no policy of residency."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        fail("no policy is named: name at least one, such as lru")
    for name in names:
        if name not in PAGE_POLICIES:
            fail(f"unknown policy of residency {name!r}; known: {', '.join(PAGE_POLICIES)}")
    return names


def replay_pages(
    directories: Sequence[Path],
    *,
    policies: Sequence[str],
    slots: Sequence[int],
    fractions: Sequence[float],
    selections: Sequence[Selection],
    json_file: Path | None,
    workers: int | RayCluster,
) -> None:
    """Replays every recording with every policy, number of slots and selection; prints and writes the rows.

    Args:
        slots: pages that each layer and head keeps, or
        fractions: the same as parts of a recording's longest context.
    """
    if selections[0].share == 0 and any(selection.bias for selection in selections):
        fail("what a selector chose is chosen: leave out one of --chosen and --resident-bias")
    if OPTIMUM in policies and all(selection.bias for selection in selections):
        fail(f"{OPTIMUM} knows no bias: add 0 to --resident-bias, or leave {OPTIMUM} out")
    recordings = [_read(directory, selections[0]) for directory in directories]
    jobs = [
        PageJob(index, policy, count, selection)
        for index, recording in enumerate(recordings)
        for selection in selections
        for policy in policies
        if not (policy == OPTIMUM and selection.bias)
        for count in _slots(recording, slots, fractions)
    ]
    rows = {}
    try:
        with counted("replaying", len(jobs)) as advance:
            for index, row in run_jobs(run_page_job, recordings, jobs, workers):
                rows[index] = row
                advance()
    except ReplayError as error:
        fail(str(error))
    except KeyboardInterrupt:
        interrupted(f"after {len(rows)} of {len(jobs)} replays")
    for number, recording in enumerate(recordings):
        show(pages_table(recording, [rows[at] for at, job in enumerate(jobs) if job.recording == number]))
    if json_file is not None:
        written = [asdict(rows[at]) for at in range(len(jobs))]
        json_file.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _read(directory: Path, selection: Selection) -> PageRecording:
    try:
        with Console(stderr=True).status(plain(f"reading {directory.name}")):
            recording = load_page_steps(directory)
        check_selection(recording, selection)
    except (TraceError, PageReplayError) as error:
        fail(str(error))
    if recording.left_out:
        Console(stderr=True).print(
            plain(
                f"{directory.name}: {recording.left_out} lists of requests that began before what is left of "
                "the recording were left out"
            )
        )
    return recording


def _slots(recording: PageRecording, slots: Sequence[int], fractions: Sequence[float]) -> list[int]:
    longest = longest_context(recording)
    return list(dict.fromkeys(slots or [max(1, int(part * longest)) for part in fractions]))
