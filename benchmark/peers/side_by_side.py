"""How long the same requests take on servers that stand side by side: each request goes to all, in turn.

    python benchmark/peers/side_by_side.py --data DIR --model .cache/models/smollm2 --seeds 5 --resume

What disturbs the machine for a while disturbs all arms alike, which servers that are started one after the
other cannot say. Servers sleep while they are not asked; who is asked first rotates. The model is whole,
everything else as in benchmark/peers/run.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.progress import track
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.peers.arms import ARMS
from benchmark.peers.run import SECONDS, ask, close_session, kept_workload
from benchmark.peers.served import Served
from benchmark.peers.workloads import UNIQUE, Sent, Texts
from benchmark.results import RESULTS, rows_so_far, write_results

from support import warm_start

SETTLES = 0.05
"""Seconds between an answer and the next request: what a server does behind its answer is its own time."""
SLEEPS = ("--sleep-on-idle",)


def started(arm: str, model: Path, pool: int) -> AbstractContextManager[Served]:
    """A server that has the machine's cores to itself while it is asked."""
    if arm not in ARMS:
        raise typer.BadParameter(f"no arm is called '{arm}': choose from {', '.join(ARMS)}")
    return ARMS[arm].started(model, pool, sglang_flags=SLEEPS, peer_threads=os.cpu_count() or 1)


def send(servers: Mapping[str, Served], requests: list[Sent], title: str) -> dict[str, list[dict[str, Any]]]:
    """One request at a time to each server; answers by arm, in the order of the requests."""
    answers: dict[str, list[dict[str, Any]]] = {arm: [] for arm in servers}
    names = list(servers)
    with httpx.Client(timeout=SECONDS, trust_env=False) as client:
        for number, request in enumerate(track(requests, description=title)):
            first = number % len(names)
            for arm in names[first:] + names[:first]:
                session = str(request.session) if ARMS[arm].tells else None
                time.sleep(SETTLES)
                start = time.perf_counter()
                answer = ask(client, servers[arm], request.ids, session)
                answers[arm].append(answer | {"seconds": time.perf_counter() - start})
                if session is not None and request.is_last:
                    close_session(client, servers[arm], session)
    return answers


def rows_of(servers: Mapping[str, Served], requests: list[Sent], title: str) -> list[dict[str, Any]]:
    before = {arm: served.cpu_seconds() for arm, served in servers.items()}
    answers = send(servers, requests, title)
    return [
        {
            "arm": arm,
            "beside": sorted(servers),
            "requests": len(requests),
            "computed": [
                len(request.ids) - answer["cached"]
                for request, answer in zip(requests, answers[arm], strict=True)
            ],
            "first_token": [round(answer["ttft"], 5) for answer in answers[arm]],
            "answered": [round(answer["seconds"], 5) for answer in answers[arm]],
            "cpu_seconds": served.cpu_seconds() - before[arm],
            "memory_bytes": served.memory_bytes(),
            "same_text": sum(
                one["text"] == other["text"]
                for one, other in zip(answers[arm], next(iter(answers.values())), strict=True)
            ),
            "flags": " ".join(served.flags),
        }
        for arm, served in servers.items()
    ]


def main(
    data: Annotated[Path, typer.Option(help="Folder with agents/ and prompts/.")],
    model: Annotated[Path, typer.Option(help="Folder of a model, as scripts/get_model.py prints it.")],
    arms: Annotated[str, typer.Option(help="Side by side, separated by commas.")] = "stock sglang,ours",
    workloads: Annotated[str, typer.Option(help="Separated by commas.")] = "documents",
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 5,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 1,
    share: Annotated[
        float, typer.Option(help="Of a workload's different tokens, that the pool holds.")
    ] = 0.25,
    resume: Annotated[bool, typer.Option(help="Measure only what the JSON lacks.")] = False,
    out: Annotated[Path, typer.Option(help="The JSON.")] = RESULTS / "peers_side_by_side.json",
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers end with us
    warm_start.is_on = True  # starts are not measured
    texts = Texts(data, Tokenizer.from_file(str(model / "tokenizer.json")))
    names = arms.split(",")
    rows = rows_so_far(out) if resume else []
    known = {(row["workload"], row["seed"], row["share"], tuple(row["beside"])) for row in rows}
    for workload in workloads.split(","):
        pool = int(UNIQUE[workload] * share)
        for seed in range(first_seed, first_seed + seeds):
            if (workload, seed, share, tuple(sorted(names))) in known:
                continue
            requests = kept_workload(workload, seed, lambda: texts)
            with ExitStack() as stack:
                servers = {arm: stack.enter_context(started(arm, model.absolute(), pool)) for arm in names}
                assert {served.pool for served in servers.values()} == {pool}
                key = {"workload": workload, "seed": seed, "share": share}
                rows += [key | row for row in rows_of(servers, requests, f"{workload} {seed}")]
            write_results("peers_side_by_side", rows, out=out)


if __name__ == "__main__":
    typer.run(main)
