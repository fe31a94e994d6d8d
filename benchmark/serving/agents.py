"""Does it pay in time? Recorded coding agents, their lengths divided by 256, on a model of 100 M parameters.

    python benchmark/serving/agents.py claude_code_sessions.jsonl.gz --resume

The arms take turns, each once in an alternation and another first in each; each alternation has another order
of sessions. Three passes of the same requests:

- ``closed``: one request at a time, the pool far smaller than the sessions that are alive;
- ``open``: by the recorded gaps, divided by what makes them 70 % of what stock serves one at a time;
- ``fits``: one at a time, the pool large enough for all.

The first requests of a server warm it up and are not timed. Rows are kept in the JSON as they come; with
``--resume`` what it has is not measured again. The model's weights are random, its folder is temporary.
"""

from __future__ import annotations

import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import RESULTS
from benchmark.serving.agent_sessions import agent_sessions, agent_workload, faster, without_hints
from benchmark.serving.agents_report import agents_tables
from benchmark.serving.arms import ARMS, STOCK
from benchmark.serving.passes import Servers
from benchmark.serving.rows import Row, Rows
from benchmark.serving.stages import in_turns
from benchmark.serving.timing import time_closed_loop, time_open_loop
from benchmark.serving.workloads import Workload, load_parameters
from sgl_importance.embedded_model import checkpoint_path
from sgl_importance.terminal import interrupted

from support.models import write_random_llama

COMMITTED = RESULTS / "serving_agents.json"
MODEL = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "initializer_range": 0.02,
}
"""Llama of 103 M parameters."""
CLOSED, OPEN, FITS = "closed", "open", "fits"
PASSES = (CLOSED, FITS, OPEN)  # the open loop's rate follows from the closed one


def gap_factor(rows: Rows, workloads: Sequence[Workload], shape: dict[str, Any]) -> float:
    """What the recorded gaps are divided by: arrivals at a share of stock's rate, one request at a time."""
    rates = [row["requests_per_second"] for row in rows if (row["pass"], row["arm"]) == (CLOSED, STOCK)]
    recorded = []
    for workload in workloads:
        timed = workload.requests[shape["warm_up"] :]
        recorded.append((len(timed) - 1) / (timed[-1].seconds - timed[0].seconds))
    return shape["load"] * statistics.median(rates) / statistics.median(recorded)


def measured(
    servers: Servers,
    workloads: Sequence[Workload],
    shape: dict[str, Any],
    rows: Rows,
    resume: bool,
    progress: Progress,
) -> Iterator[Row]:
    """One row for each pass, arm and alternation; an alternation has a workload."""
    arms, warm_up = shape["arms"], shape["warm_up"]
    bar = progress.add_task("agents", total=len(PASSES) * len(arms) * len(workloads))
    factor: float | None = None
    for which in PASSES:
        size = shape["fits_tokens" if which == FITS else "pool_tokens"]
        for alternation, name in in_turns(arms, len(workloads)):
            key = {"pass": which, "arm": name, "device_tokens": size, "alternation": alternation}
            if not (resume and rows.have(**key)):
                arm, workload = ARMS[name], workloads[alternation]
                server = servers.start(arm, workload, device_tokens=size)
                requests = workload.requests if arm.learns else without_hints(workload.requests)
                if which == OPEN:
                    known = [row["gap_factor"] for row in rows if row["pass"] == OPEN]
                    factor = factor or (known[0] if resume and known else gap_factor(rows, workloads, shape))
                    timed = time_open_loop(server, faster(requests, factor), warm_up=warm_up)
                    timed["gap_factor"] = factor
                else:
                    timed = time_closed_loop(server, requests, warm_up=warm_up)
                servers.stop()
                yield {**key, "workload": workload.name, **timed}
            progress.advance(bar)


def main(
    sessions_file: Annotated[Path, typer.Argument(help="claude_code_sessions.jsonl.gz, or a file like it.")],
    alternations: Annotated[int, typer.Option(min=0, help="0: as committed.")] = 0,
    requests: Annotated[int, typer.Option(min=0, help="Timed requests of an arm; 0: as committed.")] = 0,
    warm_up: Annotated[int, typer.Option(min=-1, help="Requests before them; -1: as committed.")] = -1,
    resume: Annotated[bool, typer.Option(help="Leave out what the JSON has.")] = False,
    out: Annotated[Path, typer.Option(help="JSON file.")] = COMMITTED,
) -> None:
    """Measure, and print the tables."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers end with us
    parameters = load_parameters()
    shape = parameters["agent_sessions"]
    shape["alternations"] = alternations or shape["alternations"]
    shape["requests"] = requests or shape["requests"]
    shape["warm_up"] = shape["warm_up"] if warm_up < 0 else warm_up
    sessions = agent_sessions(sessions_file, shape["longest_tokens"])
    workloads = [agent_workload(sessions, shape, seed) for seed in range(shape["alternations"])]
    rows = Rows(out, name="serving_agents")
    try:
        with (
            TemporaryDirectory(prefix="serving-model-") as folder,
            Progress(console=Console(stderr=True)) as progress,
        ):
            model = write_random_llama(Path(folder), tokenizer_of=checkpoint_path(), shape=MODEL)
            with Servers(parameters, model) as servers:
                for row in measured(servers, workloads, shape, rows, resume, progress):
                    rows.add(row)
    except KeyboardInterrupt:
        interrupted(f"with {len(list(rows))} rows in {out}: go on with --resume")
    print("\n\n".join(agents_tables(list(rows))))
    print(f"written: {out}")


if __name__ == "__main__":
    typer.run(main)
