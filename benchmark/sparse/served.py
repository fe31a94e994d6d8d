"""What steps that read chosen pages save, served: the embedded model on stock sglang, and on tiered pages.

    python benchmark/sparse/served.py

All servers run at once and take turns, a request at a time. ``decode``: milliseconds for each further token
of an answer over a cached prompt. ``question``: milliseconds of a request that asks for one token about a
cached document. The device of the tiered servers holds a part of the context; stock holds all of it.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import print_rows, write_results
from sgl_importance.embedded_model import checkpoint_path

from support.served import script_server
from support.servers import ServerProcess

ANSWER_TOKENS = 64
QUESTION_TOKENS = 16
TIERED = ("--kv-policy", "importance", "--kv-residency", "tiered", "--kv-importance-source", "none")
SPARSE = (*TIERED, "--kv-sparse-budget", "0.05", "--kv-sparse-prompt-tokens", str(QUESTION_TOKENS))
ARMS = {
    "stock": ("--kv-policy", "default"),
    "tiered all": TIERED,
    "tiered bits": (*SPARSE, "--kv-sparse-selector", "bits"),
}


def seconds(server: ServerProcess, prompt: list[int], tokens: int) -> float:
    start = time.perf_counter()
    server.generate(prompt, max_new_tokens=tokens, ignore_eos=True)
    return time.perf_counter() - start


def main(
    contexts: Annotated[str, typer.Option(help="Tokens, separated by commas.")] = "16384,28000",
    device_share: Annotated[float, typer.Option(help="Of the longest context, that slots may hold.")] = 0.25,
    rounds: Annotated[int, typer.Option(help="Questions and answers of each arm and context.")] = 7,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    lengths = [int(context) for context in contexts.split(",")]
    draws = random.Random(0)
    room = 2 * max(lengths)
    rows = []
    with ExitStack() as stack, Progress() as progress:
        servers = {}
        for name, flags in ARMS.items():
            device = ("--kv-device-tokens", str(int(device_share * max(lengths)))) if name != "stock" else ()
            pool = ("--max-total-tokens", str(room), "--page-size", "16", "--max-running-requests", "2")
            server = script_server(*flags, *device, *pool, "--skip-tokenizer-init", model=checkpoint_path())
            servers[name] = stack.enter_context(server)
        for length in lengths:
            document = draws.choices(range(10, 1000), k=length - QUESTION_TOKENS)
            times: dict[str, dict[str, list[float]]] = {name: {"question": [], "decode": []} for name in ARMS}
            for server in progress.track(servers.values(), description=f"{length:,} tokens: prefill"):
                seconds(server, document, 1)
            for _ in progress.track(range(rounds), description=f"{length:,} tokens: turns"):
                prompt = document + draws.choices(range(10, 1000), k=QUESTION_TOKENS)
                for name, server in servers.items():
                    one = seconds(server, prompt, 1)
                    all_tokens = seconds(server, prompt, 1 + ANSWER_TOKENS)
                    again = seconds(server, prompt, 1)
                    times[name]["question"].append(one)
                    times[name]["decode"].append((all_tokens - again) / ANSWER_TOKENS)
            for kind in ("decode", "question"):
                stock = times["stock"][kind]
                for name in ARMS:
                    own = times[name][kind]
                    ratios = sorted(other / each for other, each in zip(stock, own, strict=True))
                    rows.append(
                        {
                            "context": length,
                            "what": kind,
                            "arm": name,
                            "ms": 1000 * statistics.median(own),
                            "times_stock": statistics.median(ratios),
                            "worst_round": ratios[0],
                            "best_round": ratios[-1],
                        }
                    )
                    write_results("pages_served", rows, out=out)
    print_rows("Served, one request at a time", rows)


if __name__ == "__main__":
    typer.run(main)
