"""Does it pay? Serves committed workloads with every arm, and writes what each found, wrote and took.

    python benchmark/serving/run.py                    # counts: every arm on every workload
    python benchmark/serving/run.py --only capacity    # counts at several sizes of the device pool
    python benchmark/serving/run.py --only times       # open loop, arms in alternating order
    python benchmark/serving/run.py --only pairs       # one request at a time, arms side by side
    python benchmark/serving/run.py --only restart     # first requests after a restart
    python benchmark/serving/run.py --only seeds       # ten seeds on the same tree, without a server
    python benchmark/serving/run.py --only replay      # the optimum, and longer runs, in the replay
    python benchmark/serving/run.py --only report      # the figure from the JSON

Rows are kept in the JSON by pass, workload and arm: a later run replaces what it measures again and nothing
else; with ``--resume`` it measures only what is missing. With ``--quick`` or another ``--out`` the committed
JSON and the figure stay as they are, and the tables are printed.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import RESULTS
from benchmark.serving.arms import ARMS
from benchmark.serving.figure import draw
from benchmark.serving.measured import Measured
from benchmark.serving.passes import Row, Servers
from benchmark.serving.report import tables
from benchmark.serving.rows import Rows
from benchmark.serving.stages import STAGES, without_server
from benchmark.serving.workloads import load_parameters, make_workload
from sgl_importance.terminal import interrupted

PASSES = (*STAGES, "seeds", "replay", "report")
# Where the committed parameters say which arms and workloads a pass is about; all where nowhere.
SETTINGS = {"capacity": "capacity", "times": "timed", "pairs": "paired", "restart": "restarted"}
COMMITTED = RESULTS / "serving.json"
FIGURE = ROOT / "docs" / "img" / "serving.png"
QUICK = {"warm_up": 5, "requests": 10, "alternations": 1}


def _chosen(text: str, known: dict[str, Any], default: list[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()] or default
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"unknown {what} {', '.join(unknown)}: choose from {', '.join(known)}")
    return names


def _shorten(parameters: dict[str, Any]) -> None:
    """To an eighth of the requests, and to one alternation."""
    for shape in parameters["workloads"].values():
        shape["requests"] //= 8
        if "restart_after" in shape:
            shape["restart_after"] //= 8
    for settings in (parameters[name] for name in SETTINGS.values()):
        settings.update({name: value for name, value in QUICK.items() if name in settings})


def main(
    workloads: Annotated[str, typer.Option(help="Some of the workloads, separated by commas.")] = "",
    arms: Annotated[str, typer.Option(help="Some of the arms, separated by commas.")] = "",
    alternations: Annotated[int, typer.Option(min=0, help="Of a timed pass; 0: as committed.")] = 0,
    only: Annotated[str, typer.Option(help=f"One of {', '.join(PASSES)}.")] = "counts",
    quick: Annotated[
        bool, typer.Option(help="An eighth of the requests: whether it runs, not what it says.")
    ] = False,
    resume: Annotated[bool, typer.Option(help="Leave out what the JSON has.")] = False,
    copies: Annotated[
        bool, typer.Option(help="Count those arms too whose decisions are another's by construction.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="JSON file; the page is only made from the committed one.")
    ] = COMMITTED,
) -> None:
    """Measure, or report what was measured."""
    if only not in PASSES:
        raise typer.BadParameter(f"unknown pass {only}: choose from {', '.join(PASSES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers end with us
    parameters = load_parameters()
    if quick:
        _shorten(parameters)
        out = Path(tempfile.mkdtemp(prefix="serving-quick-")) / out.name
    settings = {**parameters.get(SETTINGS.get(only, ""), {}), "copies": copies}
    if alternations:
        settings["alternations"] = alternations
    everything = list(parameters["workloads"])
    names = _chosen(workloads, parameters["workloads"], settings.get("workloads", everything), "workload")
    chosen = _chosen(arms, ARMS, settings.get("arms", list(ARMS)), "arm")
    made = [make_workload(name, parameters) for name in names]
    if only == "restart" and (others := [workload.name for workload in made if not workload.restart_after]):
        raise typer.BadParameter(f"no restart in {', '.join(others)}")
    if only in ("times", "pairs") and (
        stored := [workload.name for workload in made if workload.tiers == "storage"]
    ):
        raise typer.BadParameter(f"{only} gives its servers no store, which {', '.join(stored)} needs")
    rows = Rows(out)

    def known(**values: Any) -> bool:
        return resume and rows.have(**{"pass": only}, **values)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress, Servers(parameters) as servers:
            measured: Iterable[Row] = ()
            if only in STAGES:
                measured = STAGES[only](servers, chosen, made, settings, known, progress)
            elif only != "report":
                measured = without_server(only, chosen, made, parameters, progress)
            for row in measured:
                rows.add({"pass": only, **row})
    except KeyboardInterrupt:
        interrupted(f"with {len(list(rows))} rows in {out}: go on with --resume")
    if out == COMMITTED:
        draw(Measured(list(rows), parameters), FIGURE)
        print("the tables of the pages: python scripts/render_docs.py")
    else:
        print("\n\n".join(text for text in tables(list(rows), parameters).values() if text.count("\n") > 1))
    print(f"written: {out}")


if __name__ == "__main__":
    typer.run(main)
