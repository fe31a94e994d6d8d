"""Arguments of the commands that grade a server, and their errors."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from sgl_importance.terminal import fail, some_path

TaskNames = Annotated[str, typer.Option(help="Comma-separated task names.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests in flight.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for one answer.")]
JsonRows = Annotated[
    Path | None,
    typer.Option("--json", parser=some_path, metavar="PATH", help="Write the rows to this file."),
]


def parse_tasks(text: str, known: Collection[str]) -> list[str]:
    """Names of ``--tasks``; fails on one that is not known, and on none."""
    tasks = [task.strip() for task in text.split(",") if task.strip()]
    unknown = [task for task in tasks if task not in known]
    if unknown or not tasks:
        fail(f"unknown task {', '.join(unknown) or text!r}: choose from {', '.join(known)}")
    return tasks


def parse_lengths(text: str, example: str) -> list[int]:
    """Numbers of ``--lengths``; fails on anything else."""
    try:
        return [int(length) for length in text.split(",")]
    except ValueError:
        fail(f"--lengths takes numbers of tokens such as {example}, not {text!r}")
