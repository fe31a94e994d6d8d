"""One attention layer of Llama-8B's shape in a decode step on a GPU: all of the context, or chosen pages.

    python benchmark/sparse/step.py

Needs torch and triton. Arms are captured as CUDA graphs, which proves that none of them waits for the device,
and take turns. ``dense`` is torch's flash attention to keys and values that lie on the device, in order.
``step`` is what tiered pages do where every chosen page has a slot: its parts are the other arms.
``copy`` brings a tenth of the chosen pages from pinned host memory. Before a shape is timed, the output is
compared with exact attention to the pages that were chosen. Each shape is in the file before the next begins.
Without a GPU, --dry-run takes the same way through tiny shapes in Triton's interpreter: times mean nothing.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark" / "kernels")]
# ruff: noqa: E402
if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
import typer
from timing import interleaved
from torch.nn.functional import scaled_dot_product_attention

from benchmark.results import print_rows, write_results
from sgl_importance_kernels.sparse.page_choice import ChoiceRule, Contexts
from sgl_importance_kernels.sparse.page_slots import PageSlots
from sgl_importance_kernels.sparse.triton.attention_kernel import attend_places
from sgl_importance_kernels.sparse.triton.choice_kernel import choose
from sgl_importance_kernels.sparse.triton.copy_kernel import copy_pages
from sgl_importance_kernels.sparse.triton.estimates import Estimates
from sgl_importance_lab.selectors.registry import ready_selector

PAGE = 16
RULE = ChoiceRule(sink_tokens=16, window_tokens=32)
TOLERANCE = 2e-2  # of bfloat16 weights and values


@dataclass(frozen=True)
class Shape:
    """A decode step: requests, tokens of each one's context, and tokens that each may read."""

    requests: int
    context: int
    selected: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128


SHAPES = [Shape(requests, context, 2048) for context in (8192, 32768, 65536) for requests in (1, 16)]
TINY = [Shape(2, 256, 96, heads=4, kv_heads=2, dim=16)]


class Step:
    """Requests whose contexts lie in a tiered pool, in any order, and densely beside it.

    Args:
        shape: of the step.
        selector: its name.
        device: where slots are.
    """

    def __init__(self, shape: Shape, selector: str, device: str) -> None:
        self.shape, self.device = shape, device
        draws = torch.Generator(device).manual_seed(0)
        per_request = shape.context // PAGE
        num_pages = shape.requests * per_request + 1
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        pool_shape = (num_pages * PAGE, shape.kv_heads, shape.dim)
        self.pool = [
            torch.empty(pool_shape, dtype=dtype, pin_memory=device == "cuda").copy_(
                torch.randn(pool_shape, dtype=dtype, device=device, generator=draws)
            )
            for _ in range(2)
        ]
        order = torch.randperm(num_pages - 1, generator=draws, device=device) + 1
        self.pages = order.view(shape.requests, per_request)
        budget = shape.selected // PAGE
        self.slots = PageSlots(
            [self.pool[0]],
            [self.pool[1]],
            num_frames=shape.requests,
            num_slots=shape.requests + 2 * shape.requests * budget,
            page_size=PAGE,
            staging_pages=1,
            device=device,
            selector=ready_selector(
                selector, self.pool[0].view(-1, PAGE, shape.kv_heads, shape.dim)[None, :64], device
            ),
            uses_triton=True,
        )
        self.slots.begin_pass(torch.zeros(0, dtype=torch.int64, device=device))
        assert self.slots.representations is not None
        self.representations = self.slots.representations
        self.representations.ensure(order)
        whole = torch.full((shape.requests,), shape.context, device=device)
        self.contexts = Contexts(self.pages, whole, torch.full_like(whole, budget), budget, PAGE)
        self.last_tokens = torch.full_like(whole, PAGE)
        size = (shape.requests, shape.heads, shape.dim)
        self.queries = torch.randn(size, dtype=dtype, device=device, generator=draws)
        self.scale = shape.dim**-0.5
        self.rows = torch.arange(shape.requests, device=device)
        self.outputs = torch.empty_like(self.queries)
        self.estimates = self.scan()
        self.chosen, self.shares = self.choose()
        self.places = self.place()
        self.copied = self.chosen[:, 1:].flatten()[::10].contiguous()  # without the page that is being filled
        self.copied_to = torch.arange(len(self.copied), device=device) + shape.requests

    def in_order(self, part: int) -> torch.Tensor:
        """Keys or values on the device, [requests, KV heads, tokens, dimension]."""
        by_page = self.pool[part].to(self.device).view(-1, PAGE, self.shape.kv_heads, self.shape.dim)
        return by_page[self.pages].flatten(1, 2).transpose(1, 2).contiguous()

    def dense_arm(self) -> Any:
        keys, values = self.in_order(0), self.in_order(1)
        queries = self.queries[:, :, None]
        return lambda: scaled_dot_product_attention(queries, keys, values, scale=self.scale, enable_gqa=True)

    def scan(self) -> Estimates:
        return self.representations.scan(
            0, self.queries, self.rows, self.scale, self.pages, self.contexts.num_before
        )

    def choose(self) -> tuple[torch.Tensor, torch.Tensor]:
        return choose(self.estimates, self.contexts, RULE)

    def place(self) -> torch.Tensor:
        return self.slots.place(0, self.chosen, is_chosen=True)

    def attend(self) -> torch.Tensor:
        slots = (self.slots.keys[0], self.slots.values[0])
        attend_places(
            self.queries,
            self.rows,
            slots,
            self.slots.host[0],
            self.places,
            self.last_tokens,
            self.scale,
            self.slots.arrivals_of(len(self.rows)),
            self.outputs,
        )
        return self.outputs

    def step(self) -> torch.Tensor:
        self.estimates = self.scan()
        self.chosen, self.shares = self.choose()
        self.places = self.place()
        return self.attend()

    def copy(self) -> None:
        for host, kept in zip(self.slots.host[0], (self.slots.keys[0], self.slots.values[0]), strict=True):
            copy_pages(host, self.copied, kept, self.copied_to)

    def largest_error(self) -> float:
        """Of the step's output, beside exact attention to the pages that it chose."""
        output = self.step().cpu()
        worst = 0.0
        for row, pages in enumerate(self.chosen.cpu()):
            keys, values = (
                part.view(-1, PAGE, *part.shape[1:])[pages[pages >= 0]].flatten(0, 1).float()
                for part in self.pool
            )
            by_head = self.queries[row].float().cpu().view(self.shape.kv_heads, -1, self.shape.dim)
            weights = (torch.einsum("kgd,nkd->kgn", by_head, keys) * self.scale).softmax(dim=-1)
            exact = torch.einsum("kgn,nkd->kgd", weights, values).flatten(0, 1)
            worst = max(worst, float((output[row] - exact).abs().max()))
        return worst


def measured(shape: Shape, selector: str, device: str) -> dict[str, Any]:
    step = Step(shape, selector, device)
    error = step.largest_error()
    arms = {name: getattr(step, name) for name in ("scan", "choose", "place", "attend", "step")}
    seconds = interleaved({"dense": step.dense_arm(), **arms}, on_device=device == "cuda")
    # It overwrites slots: last, and alone.
    seconds |= interleaved({"copy": step.copy}, on_device=device == "cuda")
    copied = len(step.copied) * step.slots.page_bytes
    return {
        "requests": shape.requests,
        "context": shape.context,
        "selected": shape.selected,
        **{f"{name}_us": 1e6 * value for name, value in seconds.items()},
        "times_dense": seconds["dense"] / seconds["step"],
        "copy_gb_per_s": copied / seconds["copy"] / 1e9,
        "largest_error": error,
    }


@torch.inference_mode()
def main(
    selector: Annotated[str, typer.Option(help="As --kv-sparse-selector.")] = "bits",
    dry_run: Annotated[
        bool, typer.Option(help="Tiny shapes in Triton's interpreter, without a GPU.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    if not dry_run and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device: take a machine with one, or --dry-run")
    rows: list[dict[str, Any]] = []
    for shape in TINY if dry_run else SHAPES:
        rows.append(measured(shape, selector, "cpu" if dry_run else "cuda"))
        if not dry_run or out is not None:
            write_results("pages_step", rows, out=out)
    print_rows("One layer, microseconds", rows)
    wrong = [row for row in rows if row["largest_error"] > TOLERANCE]
    if wrong:
        raise SystemExit(f"{len(wrong)} shapes differ from exact attention to the chosen pages: see above")


if __name__ == "__main__":
    typer.run(main)
