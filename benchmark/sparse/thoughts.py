"""Thoughts that together need four times the device's memory: stock with HiCache beside tiered pages.

    python benchmark/sparse/thoughts.py

The embedded reasoning model, served. All servers have the same device memory and are asked the same thoughts,
eight at a time, one server after the other; ratios are within a round: other work on the machine widens
their range. Stock runs as many thoughts as fit and lets the others wait, or retracts them. ``tiered`` servers
keep a page wherever it fits; with a selector a step reads the chosen part of its context, from
``--min-context`` tokens on. ``stock, resident`` has four times the device memory: what a larger device would
do. Right answers, tokens and the seconds of all thoughts are reported, as a thought that loses its way may be
shorter or longer. Rounds that the JSON has already are not run again.
"""

from __future__ import annotations

import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import RESULTS, print_rows, rows_so_far, write_results
from sgl_importance_lab.probe.word_tokenizer import END
from sgl_importance_lab.reasoner import reasoner_path
from sgl_importance_lab.reasoner.evaluate import grade
from sgl_importance_lab.reasoner.tasks import ReasoningTask, make_task
from sgl_importance_lab.reasoner.tokenizer import reasoner_tokenizer, render

from support.config_file import config_flags
from support.served import script_server
from support.servers import ServerProcess

PAGE, AT_A_TIME, OF_DEVICE, SPARE_TOKENS = 16, 8, 4, 64
HICACHE = "stock, HiCache"


def arms(tokens: int, budget: float, selectors: list[str], min_context: int) -> dict[str, tuple[str, ...]]:
    """Flags of each server. ``tokens``: that all thoughts need together."""
    device = tokens // OF_DEVICE // PAGE * PAGE
    everything = tokens + AT_A_TIME * 2 * PAGE
    tiered = (
        *("--kv-policy", "importance", "--kv-residency", "tiered", "--kv-importance-source", "none"),
        *("--max-running-requests", str(AT_A_TIME)),
        *("--kv-device-tokens", str(device), "--max-total-tokens", str(everything)),
    )
    sparse = ("--kv-sparse-budget", str(budget), "--kv-sparse-min-context", str(min_context))
    return {
        HICACHE: (
            *("--kv-policy", "default", "--max-total-tokens", str(device)),
            *("--hicache-ratio", f"{everything / device + 1:.1f}"),
        ),
        "stock, resident": ("--kv-policy", "default", "--max-total-tokens", str(everything)),
        "tiered all, lru": (*tiered, *config_flags(tiered={"policy": "lru"})),
        **{
            f"tiered {name}, lru": (
                *(*tiered, *sparse, "--kv-sparse-selector", name),
                *config_flags(tiered={"policy": "lru"}),
            )
            for name in selectors
        },
    }


def think(server: ServerProcess, task: ReasoningTask) -> tuple[bool, int]:
    """Whether the final answer is right, and the tokens of thought and answer."""
    tokenizer = reasoner_tokenizer()
    limit = len(tokenizer.encode(task.reply)) + SPARE_TOKENS
    reply = server.generate(tokenizer.encode(render(task.messages)), max_new_tokens=limit)
    pieces = {index: piece for piece, index in tokenizer.ids.items()}
    text = "".join(pieces[token] for token in reply["output_ids"] if token != tokenizer.ids[END])
    return grade(task, {"content": text}).right, len(reply["output_ids"])


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds to each row its throughput as a multiple of stock's in the same round."""
    base = {row["round"]: row for row in rows if row["arm"] == HICACHE}
    for row in rows:
        row["of stock"] = row["tokens_per_second"] / base[row["round"]]["tokens_per_second"]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each arm, over rounds."""
    found = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        ratios = [row["of stock"] for row in own]
        found.append(
            {
                "arm": arm,
                "right": sum(row["right"] for row in own) / sum(row["thoughts"] for row in own),
                "tokens": statistics.median(row["tokens"] for row in own),
                "seconds": statistics.median(row["seconds"] for row in own),
                "of stock": f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            }
        )
    return found


def main(
    length: Annotated[int, typer.Option(help="Tokens of a right thought.")] = 512,
    rounds: Annotated[int, typer.Option(help="Rounds in the end.")] = 3,
    budget: Annotated[float, typer.Option(help="Share of its context that a step reads.")] = 0.6,
    selectors: Annotated[str, typer.Option(help="What chooses it, separated by commas.")] = "token,rep",
    min_context: Annotated[int, typer.Option(help="Tokens from which on a step chooses.")] = 128,
    out: Annotated[Path, typer.Option(help="The JSON, with the rounds so far.")] = RESULTS
    / "pages_thoughts.json",
) -> None:
    rows = rows_so_far(out)
    done = 1 + max((row["round"] for row in rows), default=-1)
    tokenizer = reasoner_tokenizer()
    tasks = [
        [make_task(("search", "state")[k % 2], length, AT_A_TIME * number + k) for k in range(AT_A_TIME)]
        for number in range(rounds)
    ]
    needed = max(
        sum(len(tokenizer.encode(render(t.messages))) + len(tokenizer.encode(t.reply)) for t in of_round)
        for of_round in tasks
    )
    with ExitStack() as stack:
        servers = {
            arm: stack.enter_context(script_server(*flags, "--page-size", str(PAGE), model=reasoner_path()))
            for arm, flags in arms(needed, budget, selectors.split(","), min_context).items()
        }
        for number in track(range(done, rounds), description="rounds"):
            for arm, server in servers.items():
                start = time.perf_counter()
                with ThreadPoolExecutor(AT_A_TIME) as clients:
                    thought = list(clients.map(lambda task: think(server, task), tasks[number]))  # noqa: B023
                seconds = time.perf_counter() - start
                tokens = sum(count for _, count in thought)
                rows.append(
                    {
                        "round": number,
                        "arm": arm,
                        "length": length,
                        "budget": budget,
                        "min_context": min_context,
                        "thoughts": len(thought),
                        "right": sum(is_right for is_right, _ in thought),
                        "tokens": tokens,
                        "seconds": seconds,
                        "tokens_per_second": tokens / seconds,
                        "device_tokens": needed // OF_DEVICE // PAGE * PAGE,
                        "needed_tokens": needed,
                    }
                )
            compare(rows)
            write_results("pages_thoughts", rows, out=out)
    print_rows(f"{AT_A_TIME} thoughts at a time", summary(rows))


if __name__ == "__main__":
    typer.run(main)
