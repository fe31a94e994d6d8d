"""Tiered pages under load: documents of eight times the device's memory, sixteen questions at a time.

    python benchmark/sparse/load.py
    python benchmark/sparse/load.py --throttled

The embedded model. ``stock, HiCache`` and the tiered servers have the same device memory, an eighth of what
the documents need, and host memory for all of them; ``stock, resident`` holds everything on the device. Every
document is computed before the first round. All servers run at once; in each round they are asked the same
questions, one server after the other, and ratios are within a round: other work on the machine widens their
range. With ``--throttled`` every byte that comes from the host costs a sleep, so that host and device are as
far apart as PCIe and HBM of an H200. Rounds that the JSON has already are not run again.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import RESULTS, print_rows, rows_so_far, write_results
from benchmark.sparse.streamed import Streamed, streamed
from sgl_importance.embedded_model import checkpoint_path

from support.python_path import python_path
from support.served import script_server
from support.servers import ServerProcess

PAGE, QUESTION_TOKENS, ANSWER_TOKENS = 16, 16, 64
AT_A_TIME, OF_DEVICE = 16, 8
BYTES_PER_TOKEN = 4 * 2 * (32 + 32) * 4  # layers, KV heads, numbers of key and value, float32
HICACHE = "stock, HiCache"
TIERED = (
    *("--kv-policy", "importance", "--kv-residency", "tiered", "--kv-importance-source", "none"),
    *("--max-running-requests", str(AT_A_TIME)),
)
SPARSE = (
    *("--kv-sparse-selector", "bits", "--kv-sparse-budget", "0.05"),
    *("--kv-sparse-prompt-tokens", str(QUESTION_TOKENS)),
)
# HBM3e of 4.8 TB/s; PCIe 5.0 x16, of whose 63 GB/s copies reach about 55.
HBM_OVER_PCIE = 4.8e12 / 55e9


def arms(documents: int, tokens: int) -> dict[str, tuple[str, ...]]:
    """Flags of each server.

    Args:
        documents: how many there are.
        tokens: of each.
    """
    device = documents * tokens // OF_DEVICE // PAGE * PAGE
    running = AT_A_TIME * (QUESTION_TOKENS + ANSWER_TOKENS + 2 * PAGE)
    everything = documents * tokens + running
    stock = ("--kv-policy", "default", "--hicache-ratio")
    tiered = (*TIERED, "--kv-device-tokens", str(device), "--max-total-tokens", str(everything))
    return {
        HICACHE: (*stock, f"{everything / device + 1:.1f}", "--max-total-tokens", str(device)),
        "stock, resident": (*stock, "1.1", "--max-total-tokens", str(everything)),
        "tiered all": tiered,
        "tiered bits": (*tiered, *SPARSE),
    }


def memory_rate() -> float:
    """Bytes a second that one thread reads from this machine's memory."""
    numbers = torch.ones(2**26)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - start)
    return numbers.nbytes / min(times)


def slowed() -> dict[str, str]:
    """Environment of a server whose copies from the host are slow."""
    rate = memory_rate() / HBM_OVER_PCIE
    return {
        **python_path(Path(__file__).parent / "slow_copies"),
        "SLOW_COPIES_BYTES_PER_SECOND": f"{rate:.0f}",
    }


def ask_all(server: ServerProcess, prompts: list[list[int]], tokens: int) -> tuple[list[Streamed], float]:
    """Answers to prompts, as many at a time as the load has, and the seconds of all."""
    start = time.perf_counter()
    with ThreadPoolExecutor(AT_A_TIME) as clients:
        answered = list(clients.map(lambda prompt: streamed(server, prompt, tokens), prompts))
    return answered, time.perf_counter() - start


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds to each row its ratios to stock with HiCache in the same round."""
    base = {_round(row): row for row in rows if row["arm"] == HICACHE}
    for row in rows:
        for name in ("tokens_per_second", "ttft_p95"):
            row[f"{name}_ratio"] = row[name] / base[_round(row)][name]


def _round(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["context"], row["throttled"], row["round"]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each load and arm, medians over rounds, and the ratios with their least and most."""
    found = []
    for key in dict.fromkeys((row["context"], row["throttled"], row["arm"]) for row in rows):
        own = [row for row in rows if (row["context"], row["throttled"], row["arm"]) == key]
        shown: dict[str, Any] = dict(zip(("context", "throttled", "arm"), map(str, key), strict=True))
        for name in ("tokens_per_second", "ttft_p95"):
            ratios = [row[f"{name}_ratio"] for row in own]
            shown[name] = statistics.median(row[name] for row in own)
            of_all = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            shown[f"{name} ratio"] = of_all
        found.append(shown)
    return found


def main(
    context: Annotated[int, typer.Option(help="Tokens of a document.")] = 4096,
    documents: Annotated[int, typer.Option(help="How many.")] = 16,
    questions: Annotated[int, typer.Option(help="Of each round.")] = AT_A_TIME,
    rounds: Annotated[int, typer.Option(help="Rounds in the end.")] = 3,
    named: Annotated[
        str, typer.Option("--arms", help="Servers, separated by semicolons; all where none is named.")
    ] = "",
    throttled: Annotated[bool, typer.Option(help="Bytes from the host cost a sleep.")] = False,
    out: Annotated[Path, typer.Option(help="The JSON, with the rounds so far.")] = RESULTS
    / "pages_load.json",
) -> None:
    rows = rows_so_far(out)
    of_load = [row for row in rows if (row["context"], row["throttled"]) == (context, throttled)]
    done = 1 + max((row["round"] for row in of_load), default=-1)
    env = slowed() if throttled else {}
    draws = random.Random(done)
    names = range(10, 1000)
    texts = [random.Random(seed).choices(names, k=context - QUESTION_TOKENS) for seed in range(documents)]
    with ExitStack() as stack:
        servers = {}
        for arm, flags in arms(documents, context).items():
            if named and arm not in named.split(";"):
                continue
            common = ("--page-size", str(PAGE), "--skip-tokenizer-init")
            server = script_server(*flags, *common, model=checkpoint_path(), env=env)
            servers[arm] = stack.enter_context(server)
        for arm, server in servers.items():
            for text in track(texts, description=f"{arm}: documents"):
                server.generate(text, max_new_tokens=1)
        for number in track(range(done, rounds), description="rounds"):
            order = [draws.sample(range(documents), documents) for _ in range(-(-questions // documents))]
            asked = [each for turn in order for each in turn][:questions]
            prompts = [texts[each] + draws.choices(names, k=QUESTION_TOKENS) for each in asked]
            for arm, server in servers.items():
                answered, seconds = ask_all(server, prompts, ANSWER_TOKENS)
                rows.append(
                    {
                        "context": context,
                        "throttled": throttled,
                        "round": number,
                        "arm": arm,
                        "questions": questions,
                        "host_bytes_per_second": env.get("SLOW_COPIES_BYTES_PER_SECOND"),
                        "tokens_per_second": questions * ANSWER_TOKENS / seconds,
                        "ttft_p50": float(np.quantile([each.times[0] for each in answered], 0.5)),
                        "ttft_p95": float(np.quantile([each.times[0] for each in answered], 0.95)),
                        "seconds": seconds,
                    }
                )
            compare(rows)
            write_results("pages_load", rows, out=out)
    print_rows(f"{AT_A_TIME} questions at a time", summary(rows))


if __name__ == "__main__":
    typer.run(main)
