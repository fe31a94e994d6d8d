"""Arguments of every command that replays traces: formats, processes, hardware, result files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from sgl_importance.terminal import check_outputs, fail
from sgl_importance_lab.replay.formats.detect import READERS
from sgl_importance_lab.replay.ray_cluster import RayCluster
from sgl_importance_lab.replay.report.plot import PlotError, check_plot

HARDWARE = "Hardware"
_MOST_DIGITS = 5  # of a number of processes

FormatName = Annotated[
    str | None, typer.Option("--format", help=f"One of {', '.join(READERS)}; found by content if absent.")
]
Jobs = Annotated[
    str | None,
    typer.Option(
        metavar="N|ray[:ADDRESS]",
        help="Processes, as many as cores if absent; or a Ray cluster: the one at the address or at "
        "RAY_ADDRESS, or one that is started for the time of the replay.",
    ),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Count bad records and go on.")]
Tokenizer = Annotated[
    str | None, typer.Option(help="Hugging Face tokenizer for traces of text; bytes if absent.")
]

BytesPerToken = Annotated[
    int, typer.Option(min=1, rich_help_panel=HARDWARE, help="KV bytes of a token over all layers.")
]
PrefillTokensPerSecond = Annotated[
    float,
    typer.Option(min=1e-6, max=1e9, rich_help_panel=HARDWARE, help="Rate at which prompts are computed."),
]
HostGbps = Annotated[
    float, typer.Option(min=1e-6, rich_help_panel=HARDWARE, help="Host to device, gigabytes a second.")
]
StorageGbps = Annotated[
    float, typer.Option(min=1e-6, rich_help_panel=HARDWARE, help="Storage to host, gigabytes a second.")
]
BYTES_PER_TOKEN = 131_072
PREFILL_TOKENS_PER_SECOND = 10_000.0
HOST_GBPS = 25.0
STORAGE_GBPS = 3.0


def workers_of(jobs: str | None) -> int | RayCluster:
    """Where ``--jobs`` says to replay; fails where it says nothing that is known."""
    if jobs is None:
        return os.cpu_count() or 1
    name, colon, address = jobs.partition(":")
    if name == "ray" and bool(colon) == bool(address):
        return RayCluster(address or None)
    if not (jobs.isascii() and jobs.isdigit() and len(jobs) <= _MOST_DIGITS and int(jobs) > 0):
        fail(f"--jobs takes a number of processes such as 4, ray, or ray:10.0.0.1:6379, not {jobs!r}")
    return int(jobs)


def check_results(json_file: Path | None, plot_file: Path | None) -> None:
    """Fails, before any work is done, where a result could not be written or drawn."""
    check_outputs(json_file, plot_file)
    if plot_file is not None:
        try:
            check_plot(plot_file)
        except PlotError as error:
            fail(str(error))
