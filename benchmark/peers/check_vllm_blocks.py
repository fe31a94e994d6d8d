"""Whether benchmark/peers/vllm_blocks.py computes what vLLM's servers did.

    python benchmark/peers/check_vllm_blocks.py --data DIR --model .cache/models/smollm2

Sends it what they were sent in benchmark/results/peers.json, one request at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.peers.run import ANSWER_TOKENS, kept_workload
from benchmark.peers.victims import trace_of
from benchmark.peers.vllm_blocks import VllmBlocks
from benchmark.peers.workloads import PAGE, Sent, Texts
from benchmark.results import RESULTS, rows_so_far, write_results
from sgl_importance_lab.replay.served_nodes import ServedPages


def computed_of(requests: Sequence[Sent], pool: int) -> int:
    """Prompt tokens that vLLM computes of these requests, with so many tokens on its device."""
    blocks, served = VllmBlocks(pool // PAGE, PAGE), ServedPages(trace_of(requests))
    return sum(
        blocks.computed(served.prompt(number), len(request.ids), ANSWER_TOKENS)
        for number, request in enumerate(requests)
    )


def main(
    data: Annotated[Path, typer.Option(help="Folder with agents/ and prompts/.")],
    model: Annotated[Path, typer.Option(help="Folder of a model, as scripts/get_model.py prints it.")],
    out: Annotated[Path, typer.Option(help="The JSON.")] = RESULTS / "peers_vllm_blocks.json",
) -> None:
    texts = Texts(data, Tokenizer.from_file(str(model / "tokenizer.json")))
    rows = []
    for row in track([row for row in rows_so_far(RESULTS / "peers.json") if row["arm"] == "vLLM"]):
        if row["clients"] == 1:
            counted = computed_of(kept_workload(row["workload"], row["seed"], lambda: texts), row["pool"])
            names = "workload", "seed", "pool", "computed_tokens"
            rows.append({**{name: row[name] for name in names}, "counted_tokens": counted})
    write_results("peers_vllm_blocks", rows, out=out)
    equal = sum(row["counted_tokens"] == row["computed_tokens"] for row in rows)
    typer.echo(f"{equal} of {len(rows)} to the token")


if __name__ == "__main__":
    typer.run(main)
