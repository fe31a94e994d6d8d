"""The first token of a prompt that the device holds: a server with a chain of storage tiers beside another.

Both servers are up at once and are asked for the same prompts in turn, in an order of chance; a ratio is that
of one round of both, so that a noisy machine is noisy for both. No tier is asked for a hit on the device.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from results import print_rows, write_results
from rich.progress import track

from sgl_importance.embedded_model import checkpoint_path
from sgl_importance_lab.probe.tasks import make_document
from sgl_importance_lab.probe.tokenizer import encode
from sgl_importance_lab.study.statistics import median_of

sys.path.append(str(Path(__file__).parents[1] / "test"))
from support.servers import ServerProcess

PROMPTS = 6
DOCUMENT_TOKENS = 1000
WARM_ROUNDS = 5
FLAGS = (
    *("--kv-policy", "importance", "--page-size", "16", "--max-total-tokens", "16384"),
    *("--hicache-ratio", "2", "--enable-hierarchical-cache"),
)


def prompts() -> list[list[int]]:
    documents = (make_document(DOCUMENT_TOKENS, seed) for seed in range(PROMPTS))
    return [encode(document.messages(next(iter(document.records)))) for document in documents]


def chain_flags(folder: Path) -> tuple[str, ...]:
    """Tiers of memory, a mapped file and O_DIRECT files, of which the first is too small for all prompts."""
    file = folder / "tiers.toml"
    file.write_text(
        '[[tier]]\nkind = "dram"\ncapacity = "8MB"\n'
        f'[[tier]]\nkind = "cxl"\ncapacity = "16MB"\nfolder = "{folder / "cxl"}"\n'
        f'[[tier]]\nkind = "nvme"\ncapacity = "256MB"\nfolder = "{folder / "nvme"}"\n'
    )
    return "--kv-importance-store", str(folder / "store"), "--kv-importance-tiers", str(file)


def ask(server: ServerProcess, tokens: list[int]) -> float:
    """Seconds to the first token.

    Raises:
        AssertionError: the prompt was not on the device.
    """
    began = time.perf_counter()
    answer = server.generate(tokens, max_new_tokens=1)
    seconds = time.perf_counter() - began
    details = answer["meta_info"]["cached_tokens_details"] or {}
    assert details.get("device", 0) > len(tokens) - 32, details
    return seconds


def main(
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of all prompts on both servers.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the order.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file; default: results/hot_prefix.json.")] = None,
) -> None:
    """Measures and writes the results."""
    dice, asked = random.Random(seed), prompts()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        arms = {"no storage": (), "chain of tiers": chain_flags(Path(folder))}
        servers = {
            arm: stack.enter_context(ServerProcess(*FLAGS, *flags, model=checkpoint_path()))
            for arm, flags in arms.items()
        }
        for server in servers.values():
            for tokens in asked:
                server.generate(tokens, max_new_tokens=1)
        rows = []
        for number in track(range(WARM_ROUNDS + rounds), "Rounds"):
            row: dict[str, float] = dict.fromkeys(servers, 0.0)
            for tokens in asked:
                for arm in dice.sample(list(servers), len(servers)):
                    row[arm] += ask(servers[arm], tokens)
            if number >= WARM_ROUNDS:
                rows.append(row)
        tiers = servers["chain of tiers"].get("/kv_importance", limit=1)["store_tiers"]["tiers"]
    assert sum(tier["pages"] for tier in tiers), "nothing was stored"
    assert not any(tier.get("hit_pages") for tier in tiers), "a tier was asked"
    ratio = median_of([row["chain of tiers"] / row["no storage"] for row in rows])
    result = {
        "rounds": rounds,
        "prompts": len(asked),
        "prompt_tokens": round(sum(map(len, asked)) / len(asked)),
        **{f"ms, {arm}": 1e3 * median_of([row[arm] for row in rows]).value / len(asked) for arm in servers},
        "ratio": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
        "pages_stored": sum(tier["pages"] for tier in tiers),
    }
    print_rows("First token of a prompt on the device", [result])
    typer.echo(f"written to {write_results('hot_prefix', [result], out=out)}")


if __name__ == "__main__":
    typer.run(main)
