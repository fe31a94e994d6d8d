"""Right answers of the embedded reasoning model and its control through a server.

    python benchmark/reasoning_served.py

Greedy, unseen instances, four at a time, with the flags of ``scripts/serve.sh``. Cells that the results have
of as many instances are not asked again.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import RESULTS, print_rows, rows_so_far, write_results
from sgl_importance.terminal import counted
from sgl_importance_lab.probe.chat_client import ChatClient
from sgl_importance_lab.reasoner import control_path, reasoner_path
from sgl_importance_lab.reasoner.evaluate import ReasoningPlan, ReasoningRow, evaluate
from sgl_importance_lab.reasoner.tasks import TASKS

from support.served import script_server

MODELS = {"reasoner": (reasoner_path, ("--reasoning-parser", "qwen3")), "control": (control_path, ())}
"""With the flags that ``scripts/serve.sh`` sets for each."""
CONCURRENCY, TIMEOUT = 4, 3600.0


async def _ask(url: str, plan: ReasoningPlan) -> list[ReasoningRow]:
    async with ChatClient(url, None, TIMEOUT) as client:
        with counted("asking", plan.instances) as advance:
            return await evaluate(client, plan, CONCURRENCY, advance)


def _put(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Adds a cell, in the place of the same one of fewer instances."""
    for at, other in enumerate(rows):
        if all(other[name] == row[name] for name in ("model", "task", "length")):
            rows[at] = row
            return
    rows.append(row)


def main(
    models: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(MODELS),
    tasks: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(TASKS),
    lengths: Annotated[str, typer.Option(help="Tokens of a right thought.")] = "256,1024",
    n: Annotated[int, typer.Option(min=1, help="Instances of a cell.")] = 40,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    path = out or RESULTS / "reasoning_served.json"
    rows = rows_so_far(path)
    for model in models.split(","):
        cells = [(task, int(length)) for task in tasks.split(",") for length in lengths.split(",")]
        done = {(row["task"], row["length"]) for row in rows if row["model"] == model and row["n"] >= n}
        if set(cells) <= done:
            continue
        path_of, flags = MODELS[model]
        with script_server(*flags, model=path_of()) as server:
            for task, length in cells:
                if (task, length) not in done:
                    (row,) = asyncio.run(_ask(server.base_url, ReasoningPlan([task], [length], n)))
                    _put(rows, {"model": model, **asdict(row)})
                    write_results("reasoning_served", rows, out=path)
    print_rows("right final answers", rows)


if __name__ == "__main__":
    typer.run(main)
