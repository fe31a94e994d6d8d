"""Do slots of single KV heads, and pages fetched ahead by how far a head looks back, pay?

    python benchmark/heads.py

Thoughts of the embedded reasoning model and long answers of the embedded retrieval model, recorded as by
``benchmark/thinking.py``, whose recordings are used where they are there, and put to the study of
``sgl-importance study heads``. Counts of pages, and waits that follow from published latencies and
bandwidths: other work on the machine changes nothing.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import RESULTS
from benchmark.thinking import recordings_of
from sgl_importance_lab.reasoner import reasoner_path
from sgl_importance_lab.study.heads.study_heads import study_heads
from sgl_importance_lab.study.thinking.marks import Marks, read_marks


def main(
    tasks: Annotated[str, typer.Option(help="Separated by commas.")] = "search,state",
    length: Annotated[int, typer.Option(help="Tokens of a right thought, and most of a text.")] = 1024,
    n: Annotated[int, typer.Option(min=4, help="Thoughts of each task, with pages of 16.")] = 10,
    recordings: Annotated[Path, typer.Option(help="Folder that keeps recordings.")] = ROOT / "build/thinking",
    out: Annotated[Path, typer.Option(help="Folder for JSON.")] = RESULTS / "findings/heads",
) -> None:
    for folder in (recordings, out):
        folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, Marks] = {}
    found = []
    for recording, marks in recordings_of(recordings, reasoner_path(), tasks.split(","), length, n):
        found.append(recording)
        known |= {} if marks is None else read_marks(marks)
    command = ["python", "benchmark/heads.py", "--tasks", tasks, "--length", str(length), "--n", str(n)]
    console = Console()
    for finding in study_heads(found, known):
        finding.show(console)
        finding.write(out, found, shlex.join(command))


if __name__ == "__main__":
    typer.run(main)
