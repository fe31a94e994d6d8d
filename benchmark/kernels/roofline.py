"""What a decode step over tiered pages can take at best, predicted from bytes, launches and the link.

    python benchmark/kernels/roofline.py --json FILE

Nothing is measured here: every number is a prediction from rates that vendors name. ``floor`` is a step
whose copies from the host are hidden and whose launches cost nothing; ``eager`` adds the host's time for
each launch, of a step that is launched piece by piece, and the link; ``captured`` adds what a kernel of
a CUDA graph costs a device, with copies hidden as far as they can be; ``waited`` is the same with copies
that are waited for. ``count_step.py`` counts the launches, ``real_model/ahead.py`` what is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import typer

from benchmark.results import print_rows, write_results

GB, MS = 1e9, 1e3
REACHED = 0.85
"""Part of the memory's rate that kernels reach."""
EAGER_SECONDS = 6e-6
"""Host time of an operation that is not captured."""
CAPTURED_SECONDS = 1.5e-6
"""Device time between two kernels of a CUDA graph."""


@dataclass(frozen=True)
class Device:
    """Bytes per second of its memory and of its link to the host, and bytes that weights leave for KV."""

    memory_rate: float
    link_rate: float
    kv_bytes: float


@dataclass(frozen=True)
class Model:
    """What a decode step of a model reads and does whatever its attention."""

    layers: int
    kv_token_bytes: int
    weight_bytes: float
    other_seconds: float


DEVICES = {
    "H100": Device(3.35e12, 50e9, 54e9),
    "H200": Device(4.8e12, 50e9, 115e9),
    "B200": Device(8.0e12, 50e9, 150e9),
}
LLAMA_8B = Model(layers=32, kv_token_bytes=2 * 32 * 8 * 128 * 2, weight_bytes=16.06e9, other_seconds=0.5e-3)
SELECTORS = {"bits": 0.069, "rep": 0.063, "quest": 0.125, "mean": 0.031, "all": 0.0}
"""Bytes that a selector keeps of a page and scans in each step, in those of its keys and values."""
SHAPES = [(context, batch) for context in (8192, 32768, 131072) for batch in (1, 16, 64)]


def predicted(
    device: Device,
    model: Model,
    context: int,
    batch: int,
    selector: str,
    *,
    budget: float,
    missing: float,
    launches_per_layer: float,
) -> dict[str, Any]:
    """Milliseconds of a step, and tokens per second.

    Args:
        budget: part of a context that a step reads.
        missing: part of what it reads that comes over the link.
        launches_per_layer: of tiered attention.
    """
    rate = device.memory_rate * REACHED
    kv_bytes = context * batch * model.kv_token_bytes
    around = model.weight_bytes / rate + model.other_seconds
    fitting = min(batch, int(device.kv_bytes // (context * model.kv_token_bytes)))
    dense = around + kv_bytes * (fitting / batch) / rate
    read = kv_bytes * (1.0 if selector == "all" else budget)
    scan_seconds, read_seconds = kv_bytes * SELECTORS[selector] / rate, read / rate
    link_seconds = read * missing / device.link_rate
    floor = around + scan_seconds + read_seconds
    launches = model.layers * launches_per_layer
    eager = floor + launches * EAGER_SECONDS + link_seconds
    graph = floor + launches * CAPTURED_SECONDS
    waited, captured = graph + link_seconds, max(graph, link_seconds)
    per_dense = fitting / dense
    return {
        "context": context,
        "batch": batch,
        "selector": selector,
        "budget": budget,
        "missing": missing,
        "kv_gb": kv_bytes / GB,
        "dense_requests": fitting,
        "dense_ms": MS * dense,
        "scan_ms": MS * scan_seconds,
        "read_ms": MS * read_seconds,
        "link_ms": MS * link_seconds,
        "floor_ms": MS * floor,
        "eager_ms": MS * eager,
        "waited_ms": MS * waited,
        "captured_ms": MS * captured,
        "floor_times_dense": batch / floor / per_dense if fitting else None,
        "eager_times_dense": batch / eager / per_dense if fitting else None,
        "waited_times_dense": batch / waited / per_dense if fitting else None,
        "captured_times_dense": batch / captured / per_dense if fitting else None,
    }


def predictions(
    devices: Sequence[str],
    selectors: Sequence[str],
    reads: Sequence[tuple[float, float]],
    launches_per_layer: float,
) -> list[dict[str, Any]]:
    """A row for each device, shape, selector, and pair of budget and what is missing of it."""
    return [
        {
            "device": name,
            **predicted(
                DEVICES[name],
                LLAMA_8B,
                *shape,
                selector,
                budget=budget,
                missing=missing,
                launches_per_layer=launches_per_layer,
            ),
        }
        for name in devices
        for shape in SHAPES
        for selector in selectors
        for budget, missing in reads
    ]


def main(
    json: Annotated[Path | None, typer.Option(help="Write the rows there.")] = None,
    device: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(DEVICES)}; several.")] = None,
    selector: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(SELECTORS)}; several.")] = None,
    budget: Annotated[
        list[float] | None, typer.Option(help="Part of a context that a step reads; several.")
    ] = None,
    missing: Annotated[
        list[float] | None,
        typer.Option(help="Part of what it reads that comes from the host; of each budget."),
    ] = None,
    launches_per_layer: Annotated[float, typer.Option(help="As count_step.py counts them.")] = 6.0,
) -> None:
    for given, known in ((device, DEVICES), (selector, SELECTORS)):
        if unknown := sorted(set(given or []) - set(known)):
            raise typer.BadParameter(f"{', '.join(unknown)} is not known: use one of {', '.join(known)}")
    budgets, parts = budget or [0.05], missing or [0.1]
    if len(budgets) != len(parts):
        raise typer.BadParameter("give as many --missing as --budget")
    reads = list(zip(budgets, parts, strict=True))
    rows = predictions(device or ["H200"], selector or ["bits"], reads, launches_per_layer)
    if json is not None:
        write_results("roofline", rows, out=json)
    print_rows("Predictions, Llama-3-8B", rows)


if __name__ == "__main__":
    typer.run(main)
