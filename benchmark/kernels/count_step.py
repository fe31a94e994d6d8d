"""Launches and host waits of a decode step over tiered pages, counted on a CPU; no device is needed.

    python benchmark/kernels/count_step.py --json FILE

The attention of a tiny model, as a server with ``--attention-backend triton`` has it, goes through one
step: requests of equal contexts, each in the middle of a page, all of their pages known. A dispatch mode
counts (``test/support/device_counts.py``): each operation of torch and each kernel of Triton is a
launch, and Triton's are not run; what makes a host wait for its device is a sync. Sizes of heads change
neither number.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402

import torch
import typer

from benchmark.results import print_rows, write_results

from support.drivers.counted_step import LAYERS, CountedStep

BATCHES = (1, 16, 64)


def counted(batch: int, context: int, selector: str) -> dict[str, Any]:
    found = CountedStep(batch, context, selector).count()
    launches = {name: count / LAYERS for name, count in sorted(found.of_layers.launches.items())}
    return {
        "batch": batch,
        "context": context,
        "selector": selector,
        "launches_per_layer": sum(launches.values()),
        "host_syncs_per_step": sum(found.of_pass.syncs.values()) + sum(found.of_layers.syncs.values()),
        "launches_per_step": sum(found.of_pass.launches.values()),
        "layers": LAYERS,
        "launches": launches,
        "syncs": dict(found.of_pass.syncs + found.of_layers.syncs),
    }


@torch.inference_mode()
def main(
    json: Annotated[Path | None, typer.Option(help="Write the rows there.")] = None,
    context: Annotated[int, typer.Option(help="Tokens of each request.")] = 312,
    selector: Annotated[list[str] | None, typer.Option(help="As --kv-sparse-selector; several.")] = None,
) -> None:
    rows = [counted(batch, context, name) for name in selector or ["token", "bits"] for batch in BATCHES]
    if json is not None:
        write_results("count_step", rows, out=json)
    print_rows("A decode step", [{k: v for k, v in row.items() if not isinstance(v, dict)} for row in rows])


if __name__ == "__main__":
    typer.run(main)
