"""Arguments of every command that replays traces: formats, processes, hardware, result files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sgl_importance.replay.formats.detect import READERS
from sgl_importance.replay.report.plot import PlotError, check_plot
from sgl_importance.terminal import check_outputs, fail

HARDWARE = "Hardware"

FormatName = Annotated[
    str | None, typer.Option("--format", help=f"One of {', '.join(READERS)}; found by content if absent.")
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes; as many as cores if absent.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Count bad records and go on.")]
Tokenizer = Annotated[
    str | None, typer.Option(help="Hugging Face tokenizer for traces of text; bytes if absent.")
]

BytesPerToken = Annotated[
    int, typer.Option(min=1, rich_help_panel=HARDWARE, help="KV bytes of a token over all layers.")
]
PrefillTokensPerSecond = Annotated[
    float, typer.Option(min=1e-6, rich_help_panel=HARDWARE, help="Rate at which prompts are computed.")
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


def check_results(json_file: Path | None, plot_file: Path | None) -> None:
    """Fails, before any work is done, where a result could not be written or drawn."""
    check_outputs(json_file, plot_file)
    if plot_file is not None:
        try:
            check_plot(plot_file)
        except PlotError as error:
            fail(str(error))
