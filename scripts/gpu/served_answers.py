"""Serves the embedded retrieval model on a GPU in each way that this policy adds, and compares with stock.

    python scripts/gpu/served_answers.py --out FILE --logs FOLDER

Prompts have one right answer each, which only attention to the right record gives. All servers run at the
same time. A line of JSON per arm: how many answers are right, and how many are the same text as stock's.
--dry-run takes the same way on a CPU, without what is Triton's.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmark/kernels"), str(ROOT / "benchmark/lab")]
# ruff: noqa: E402

import httpx
import typer
from launched_server import facts, server
from served_steps import REUSE_ALONE

from sgl_importance.embedded_model import checkpoint_path
from sgl_importance_lab.probe.tasks import make_task

LENGTHS = (300, 1200, 3000)
SEEDS = range(16)
FLAGS = (
    *("--model-path", str(checkpoint_path()), "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--page-size", "16", "--host", "127.0.0.1", "--max-running-requests", "16"),
    *("--max-total-tokens", "131072"),
)
ON_GPU = ("--dtype", "bfloat16", "--attention-backend", "triton", "--mem-fraction-static", "0.6")
ON_CPU = ("--dtype", "float32", "--device", "cpu")
SCORES = ("--kv-policy", "importance", "--cuda-graph-backend-prefill", "disabled", "--kv-importance-source")
TIERED = ("--kv-policy", "importance", "--kv-residency", "tiered", "--kv-device-tokens", "16384")
CHOSEN = (*TIERED, "--kv-sparse-selector", "bits", "--kv-sparse-budget", "0.2")
EAGER = ("--disable-cuda-graph",)
ARMS = {
    "default": ("--kv-policy", "default"),
    "importance": REUSE_ALONE,
    "scores by triton": (*SCORES, "triton"),
    "scores by qk_probe": (*SCORES, "qk_probe"),
    "tiered": (*TIERED, *EAGER),
    "tiered, bits": (*CHOSEN, *EAGER),
    "tiered, bits, in graphs": (*CHOSEN, "--cuda-graph-backend-prefill", "disabled"),
}


ON_GPU_ONLY = ("scores by triton", "scores by qk_probe", "tiered, bits, in graphs")


def answers(url: str) -> list[tuple[str, bool]]:
    """The text of each answer, and whether it is right; requests come together."""
    tasks = [make_task("multi-key-needle", length, seed) for length in LENGTHS for seed in SEEDS]

    def ask(task: Any) -> tuple[str, bool]:
        body = {"model": "default", "messages": task.messages, "temperature": 0, "max_tokens": 8}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        reply.raise_for_status()
        text = reply.json()["choices"][0]["message"]["content"].strip()
        return text, task.answer.strip() in text

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, tasks))


def main(
    out: Annotated[Path, typer.Option(help="Lines of JSON are added there.")],
    logs: Annotated[Path, typer.Option(help="Folder for what the servers say.")],
    dry_run: Annotated[bool, typer.Option(help="On a CPU.")] = False,
    minutes: Annotated[float, typer.Option(help="For all arms, which run at the same time.")] = 2.5,
    only: Annotated[list[str] | None, typer.Option(help="Of the arms; several.")] = None,
) -> None:
    deadline = time.monotonic() + 60 * minutes
    names = only or [name for name in ARMS if not (dry_run and name in ON_GPU_ONLY)]
    arms = {name: ARMS[name] for name in names}
    flags = (*FLAGS, *(ON_CPU if dry_run else ON_GPU))

    def served(arm: str) -> list[tuple[str, bool]] | str:
        log = logs / f"answers-{arm.replace(', ', '-').replace(' ', '-')}.log"
        try:
            with server([*flags, *arms[arm]], log, deadline) as url:
                answers(url)  # computed, and then once more from the cache
                return answers(url)
        except (RuntimeError, httpx.HTTPError) as error:
            return str(error) or type(error).__name__

    with ThreadPoolExecutor(1 if dry_run else len(arms)) as pool:
        found = dict(zip(arms, pool.map(served, arms), strict=True))
    rows: list[dict[str, Any]] = [facts()]
    stock = found.get("default", "not served")
    for arm, came in found.items():
        if isinstance(came, str):
            rows.append({"arm": arm, "failed": came})
            continue
        row = {"arm": arm, "answers": len(came), "right": sum(right for _, right in came)}
        if not isinstance(stock, str):
            row["as_stock"] = sum(mine[0] == its[0] for mine, its in zip(came, stock, strict=True))
        rows.append(row)
    with out.open("a") as lines:
        for row in rows:
            print(json.dumps(row), file=lines)
            print(json.dumps(row), flush=True)
    if failed := [row["arm"] for row in rows if "failed" in row]:
        sys.exit(f"error: failed: {', '.join(failed)}")


if __name__ == "__main__":
    typer.run(main)
