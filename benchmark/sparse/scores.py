"""What page scores cost beside a selector: host time on them, beside the time of the requests.

    python benchmark/sparse/scores.py

The embedded model over tiered pages, one request at a time; a twentieth of the context is chosen. Only tokens
that read all pages are observed: ``prompt`` has those of a new document, ``question`` those of a question
about a cached one, which reads all of it, and ``choosing question`` none, as its tokens choose, too. Both
parts of the ratio are taken in one run, so that other work on the machine slows both.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import print_rows, write_results
from sgl_importance.embedded_model import checkpoint_path

from support.served import script_server
from support.servers import ServerProcess

QUESTION_TOKENS = 16
TIERED = (
    *("--kv-policy", "importance", "--kv-residency", "tiered", "--kv-device-tokens", "0.3"),
    *("--kv-sparse-selector", "bits", "--kv-sparse-budget", "0.05", "--max-running-requests", "2"),
    *("--kv-importance-source", "torch_native", "--page-size", "16", "--skip-tokenizer-init"),
)


def timed(server: ServerProcess, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Seconds of requests, one after the other, and what was spent on page scores meanwhile."""

    def counts() -> tuple[float, float]:
        return (
            server.metric("sglang:kv_importance_emissions_total"),
            server.metric("sglang:kv_importance_emission_seconds_total"),
        )

    passes, spent = counts()
    start = time.perf_counter()
    for prompt in prompts:
        server.generate(prompt, max_new_tokens=tokens, ignore_eos=True)
    seconds = time.perf_counter() - start
    passes_after, spent_after = counts()
    n = len(prompts)
    return {
        "answer_tokens": tokens,
        "n": n,
        "observed_passes": (passes_after - passes) / n,
        "request_ms": 1000 * seconds / n,
        "scores_ms": 1000 * (spent_after - spent) / n,
        "share": (spent_after - spent) / seconds,
    }


def main(
    contexts: Annotated[str, typer.Option(help="Tokens, separated by commas.")] = "8192,16384",
    n: Annotated[int, typer.Option(help="Requests of each kind.")] = 6,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    lengths = [int(each) for each in contexts.split(",")]
    pool = ("--max-total-tokens", str(3 * max(lengths)))
    draws = random.Random(0)
    rows: list[dict[str, Any]] = []

    def tokens(count: int) -> list[int]:
        return draws.choices(range(10, 1000), k=count)

    for choosing in (0, QUESTION_TOKENS):
        flags = (*TIERED, *pool, "--kv-sparse-prompt-tokens", str(choosing))
        with script_server(*flags, model=checkpoint_path()) as server:
            for length in track(lengths, description="choosing questions" if choosing else "questions"):
                documents = [tokens(length - QUESTION_TOKENS) for _ in range(n)]
                if choosing:
                    server.generate(documents[0], max_new_tokens=1)
                else:
                    rows.append({"what": "prompt", "context": length, **timed(server, documents, 64)})
                    server.generate(documents[0], max_new_tokens=1)
                what = "choosing question" if choosing else "question"
                for answer in (8, 64):
                    asked = [documents[0] + tokens(QUESTION_TOKENS) for _ in range(n)]
                    rows.append({"what": what, "context": length, **timed(server, asked, answer)})
                write_results("pages_scores", rows, out=out)
    print_rows("Page scores beside a selector", rows)


if __name__ == "__main__":
    typer.run(main)
