"""How far right thoughts of the reasoning tasks look back: planted by the generator, counted in tokens.

python benchmark/look_backs.py
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
# ruff: noqa: E402
from benchmark.results import print_rows, write_results
from sgl_importance_lab.reasoner.look_backs import look_back_table
from sgl_importance_lab.reasoner.tasks import MOST_TOKENS, TASKS, make_task


def main(
    lengths: Annotated[str, typer.Option(help="Tokens, separated by commas.")] = "512,1024,2048,4096",
    n: Annotated[int, typer.Option(min=1, help="Thoughts of a cell.")] = 50,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    rows = [
        {"length": length, **asdict(row)}
        for task in TASKS
        for length in map(int, lengths.split(","))
        if length <= MOST_TOKENS[task]
        for row in look_back_table(make_task(task, length, seed) for seed in range(n))
    ]
    write_results("look_backs", rows, out=out)
    print_rows("Look-backs", [{**row, "up_to": " ".join(map(str, row["up_to"].values()))} for row in rows])


if __name__ == "__main__":
    typer.run(main)
