"""Does it pay? Serves committed workloads with every arm, and writes what each found, wrote and took.

    python benchmark/serving/run.py                    # counts: every arm on every workload
    python benchmark/serving/run.py --only capacity    # counts at several sizes of the device pool
    python benchmark/serving/run.py --only times       # open loop, arms in alternating order
    python benchmark/serving/run.py --only restart     # first requests after a restart
    python benchmark/serving/run.py --only seeds       # ten seeds on the same tree, without a server
    python benchmark/serving/run.py --only replay      # the optimum, and longer runs, in the replay
    python benchmark/serving/run.py --only report      # table and figure from the JSON

Rows are kept in the JSON by pass, workload and arm: a later run replaces what it measures again.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
# ruff: noqa: E402
from benchmark.results import RESULTS, write_results
from benchmark.serving.arms import ARMS
from benchmark.serving.passes import Row, Servers, count, time_first_requests, time_open_loop
from benchmark.serving.replayed import replay_workload
from benchmark.serving.report import write_report
from benchmark.serving.workloads import Workload, load_parameters, make_workload

from serving import ServerFailed

PASSES = ("counts", "capacity", "times", "restart", "seeds", "replay", "report")
SEEDS = 10
# Two rows with the same values of these are the same measurement.
KEY = ("pass", "workload", "arm", "device_tokens", "alternation", "document", "policy", "factor", "seed")


class Table:
    """The rows measured so far, kept in the JSON after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        known = json.loads(path.read_text())["rows"] if path.exists() else []
        self.rows: dict[tuple[Any, ...], Row] = {self._key(row): row for row in known}
        self._commit = _commit()

    def add(self, row: Row) -> None:
        row = {**row, "commit": self._commit}
        self.rows[self._key(row)] = row
        write_results("serving", list(self.rows.values()), out=self.path)

    @staticmethod
    def _key(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in KEY)


def _commit() -> str:
    """What was measured: the last commit, marked where a Python file has changed since."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)

    commit = git("rev-parse", "--short", "HEAD").stdout.strip() or "unknown"
    return f"{commit}-dirty" if git("status", "--porcelain", "--", "*.py").stdout else commit


def _chosen(text: str, known: dict[str, Any], default: list[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()] or default
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"unknown {what} {', '.join(unknown)}: choose from {', '.join(known)}")
    return names


def counts(
    servers: Servers,
    arms: list[str],
    workloads: list[Workload],
    done: set[tuple[str, str]],
    progress: Progress,
) -> Iterator[Row]:
    for name in arms:
        for workload in workloads:
            if (workload.name, name) in done or ARMS[name].is_copy(workload.tiers):
                continue
            bar = progress.add_task(f"{workload.name}: {name}", total=len(workload.requests))
            start = time.perf_counter()
            try:
                row = count(servers, name, workload, lambda bar=bar: progress.advance(bar))
            except ServerFailed as error:
                progress.print(f"{name} on {workload.name}, left out (--resume): {error}", markup=False)
                continue
            finally:
                progress.remove_task(bar)
            yield {"pass": "counts", **row, "took": round(time.perf_counter() - start, 1)}
            for other, arm in ARMS.items():
                if arm.same_as == name and arm.is_copy(workload.tiers):
                    yield {"pass": "counts", **row, "arm": other, "copied_from": name}


def capacity(
    servers: Servers, arms: list[str], workloads: list[Workload], sizes: list[int], progress: Progress
) -> Iterator[Row]:
    bar = progress.add_task("capacity", total=len(arms) * len(workloads) * len(sizes))
    for name in arms:
        for size in sizes:
            for workload in workloads:
                row = count(servers, name, workload, device_tokens=size)
                progress.advance(bar)
                yield {"pass": "capacity", "device_tokens": size, **row}


def without_server(
    kind: str, workloads: list[str], parameters: dict[str, Any], progress: Progress
) -> Iterator[Row]:
    for name in progress.track(workloads, description=kind):
        if kind == "replay":
            rows = replay_workload(name, parameters)
        else:
            from benchmark.serving.in_process import replay_seeds  # brings torch and sglang

            rows = replay_seeds(name, parameters, SEEDS)
        yield from ({"pass": kind, **row} for row in rows)


def times(
    servers: Servers,
    arms: list[str],
    workloads: list[Workload],
    timed: dict[str, Any],
    alternations: int,
    progress: Progress,
) -> Iterator[Row]:
    bar = progress.add_task("times", total=alternations * len(arms) * len(workloads))
    for alternation in range(alternations):
        turn = alternation % len(arms)
        for name in (*arms[turn:], *arms[:turn]):
            for place, workload in enumerate(workloads):
                # What a policy has learnt stays from one workload to the next, as on a server that runs on.
                server = servers.start(ARMS[name], workload, fresh=place == 0)
                requests = workload.requests[: timed["warm_up"] + timed["requests"]]
                row = time_open_loop(server, requests, warm_up=timed["warm_up"])
                progress.advance(bar)
                yield {
                    "pass": "times",
                    "workload": workload.name,
                    "arm": name,
                    "alternation": alternation,
                    **row,
                }


def main(
    workloads: Annotated[str, typer.Option(help="Some of the workloads, separated by commas.")] = "",
    arms: Annotated[str, typer.Option(help="Some of the arms, separated by commas.")] = "",
    alternations: Annotated[int, typer.Option(min=0, help="Of the timed pass; 0: as committed.")] = 0,
    only: Annotated[str, typer.Option(help=f"One of {', '.join(PASSES)}.")] = "counts",
    quick: Annotated[
        bool, typer.Option(help="An eighth of the requests: whether it runs, not what it says.")
    ] = False,
    resume: Annotated[bool, typer.Option(help="Leave out counts that the JSON has.")] = False,
    out: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "serving.json",
) -> None:
    """Measure, or report what was measured."""
    if only not in PASSES:
        raise typer.BadParameter(f"unknown pass {only}: choose from {', '.join(PASSES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers end with us
    parameters = load_parameters()
    table = Table(out)
    settings = parameters.get({"times": "timed"}.get(only, only), {})
    everything = [
        name
        for name, shape in parameters["workloads"].items()
        if only != "restart" or "restart_after" in shape
    ]
    names = _chosen(workloads, parameters["workloads"], settings.get("workloads", everything), "workload")
    chosen = _chosen(arms, ARMS, settings.get("arms", list(ARMS)), "arm")
    if quick:
        for shape in parameters["workloads"].values():
            shape["requests"] //= 8
            if "restart_after" in shape:
                shape["restart_after"] //= 8
        settings = {**settings, "warm_up": 5, "requests": 10}
    made = [make_workload(name, parameters) for name in names]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, Servers(parameters) as servers:
        if only == "counts":
            done = {(row["workload"], row["arm"]) for row in table.rows.values() if row["pass"] == "counts"}
            rows = counts(servers, chosen, made, done if resume else set(), progress)
        elif only == "capacity":
            rows = capacity(servers, chosen, made, settings["device_tokens"], progress)
        elif only == "times":
            rounds = alternations or settings["alternations"]
            rows = times(servers, chosen, made, settings, rounds, progress)
        elif only == "restart":
            rows = (
                {"pass": "restart", **row}
                for name in chosen
                for w in made
                for row in time_first_requests(servers, name, w)
            )
        elif only in ("replay", "seeds"):
            on_device = [w.name for w in made if w.tiers == "device"]
            rows = without_server(only, on_device, parameters, progress)
        else:
            rows = iter(())
        for row in rows:
            table.add(row)
    if not quick:
        write_report(list(table.rows.values()), parameters)
    print(f"written: {out}")


if __name__ == "__main__":
    typer.run(main)
