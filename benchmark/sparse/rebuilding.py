"""What it takes to build again what a selector keeps of pages that come back from storage.

    python benchmark/sparse/rebuilding.py

One layer of Llama-8B's shape, float32, one thread. Processor time, the least of several tries, so that other
work on the machine disturbs it little; beside it one token's attention to the same pages, and a copy of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]
# ruff: noqa: E402
from benchmark.results import print_rows, write_results
from sgl_importance_kernels.sparse.representations import Representations
from sgl_importance_kernels.sparse.streamed_attention import attend
from sgl_importance_lab.selectors.registry import ready_selector

PAGE, HEADS, KV_HEADS, DIM = 16, 32, 8, 128
BF16_BYTES = 2


def least_ms(work: Callable[[], object], tries: int) -> float:
    """Milliseconds of processor time of the fastest try."""
    found = []
    for _ in range(tries):
        start = time.process_time()
        work()
        found.append(1000 * (time.process_time() - start))
    return min(found)


def main(
    context: Annotated[int, typer.Option(help="Tokens.")] = 16384,
    tries: Annotated[int, typer.Option(help="Of each measurement.")] = 9,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    torch.set_num_threads(1)
    pages = torch.arange(context // PAGE)
    keys, values = (torch.randn(len(pages), PAGE, KV_HEADS, DIM) for _ in range(2))
    query = torch.randn(1, HEADS, DIM)
    room = torch.empty_like(keys), torch.empty_like(values)
    attention = least_ms(lambda: attend(query, keys.flatten(0, 1), values.flatten(0, 1), DIM**-0.5), tries)
    copy = least_ms(lambda: (room[0].copy_(keys), room[1].copy_(values)), tries)
    rows = []
    for name in ("bits", "rep", "infllm", "token", "quest", "mean"):
        kept = Representations(ready_selector(name, keys[None]), (keys,), "cpu")
        build = least_ms(lambda kept=kept: kept.build(0, pages, keys), tries)
        rows.append(
            {
                "selector": name,
                "context": context,
                "build_ms": build,
                "attention_ms": attention,
                "copy_ms": copy,
                "of_attention": build / attention,
                "bytes_of_bf16_kv": kept.num_bytes / (2 * keys.numel() * BF16_BYTES),
            }
        )
        write_results("pages_rebuilding", rows, out=out)
    print_rows("Building what a selector keeps, one layer", rows)


if __name__ == "__main__":
    typer.run(main)
