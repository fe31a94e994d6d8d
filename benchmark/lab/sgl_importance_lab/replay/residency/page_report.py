"""Replays of page lists: jobs, rows and their table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from sgl_importance.terminal import add_texts, plain
from sgl_importance_lab.replay.residency.page_replay import PageCounts, Selection, longest_context, run_policy
from sgl_importance_lab.replay.residency.page_steps import PageRecording


@dataclass(frozen=True, slots=True)
class PageJob:
    """One replay; ``recording`` is an index into the recordings of the run."""

    recording: int
    policy: str
    num_slots: int
    selection: Selection


@dataclass(frozen=True, slots=True)
class PageRow:
    """Result of a replay.

    Attributes:
        slots: pages that each layer and KV head keeps; each layer, where a selector chose.
        of_context: these, as a part of the longest context.
        selected: share of the pages that a token reads; 0 for what a selector chose.
        bias: on resident pages.
        requests: that generated tokens.
        read: pages that generated tokens read, counted once for each layer and head.
        loaded: those that were not on the device.
        loaded_share: loaded / read.
        covered_mass: share of the attention that fell on what was read; None where a selector chose.
        seconds: wall time of the replay.
    """

    recording: str
    policy: str
    slots: int
    of_context: float
    selected: float
    bias: float
    requests: int
    read: int
    loaded: int
    loaded_share: float
    covered_mass: float | None
    seconds: float


def run_page_job(recordings: Sequence[PageRecording], job: PageJob) -> PageRow:
    """Runs one job."""
    recording = recordings[job.recording]
    start = time.perf_counter()
    counts = run_policy(recording, job.policy, job.num_slots, job.selection)
    seconds = time.perf_counter() - start
    read, loaded = int(counts.read.sum()), int(counts.loaded.sum())
    return PageRow(
        recording=recording.name,
        policy=job.policy,
        slots=job.num_slots,
        of_context=job.num_slots / longest_context(recording),
        selected=job.selection.share,
        bias=job.selection.bias,
        requests=int((counts.read > 0).sum()),
        read=read,
        loaded=loaded,
        loaded_share=loaded / max(read, 1),
        covered_mass=_covered(counts) if job.selection.share else None,
        seconds=seconds,
    )


def _covered(counts: PageCounts) -> float:
    return float(counts.mass.sum() / max(int(counts.heads.sum()), 1))


def pages_table(recording: PageRecording, rows: Sequence[PageRow]) -> Table:
    """The rows of one recording."""
    titles = ("slots", "of context", "read", "loaded", "of read", "mass read", "s")
    table = Table(
        Column("policy", no_wrap=True),
        *(Column(title, justify="right", no_wrap=True) for title in titles),
        box=SIMPLE_HEAD,
        title=plain(
            f"{recording.name}: {len(recording.requests)} requests, pages of {recording.page_size} tokens",
            "table.title",
        ),
    )
    for row in rows:
        add_texts(
            table,
            row.policy + (f", bias {row.bias:g}" if row.bias else ""),
            f"{row.slots:,}",
            f"{row.of_context:.0%}",
            f"{row.read:,}",
            f"{row.loaded:,}",
            f"{row.loaded_share:.4f}",
            "" if row.covered_mass is None else f"{row.covered_mass:.4f}",
            f"{row.seconds:.1f}",
        )
    return table
