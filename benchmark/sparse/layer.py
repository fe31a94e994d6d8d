"""One attention layer of a Llama-8B in a decode step: all of a context, or the pages that a selector chooses.

    python benchmark/sparse/layer.py

The arms take turns on the same query, one request, float32, one thread; processor times, medians over steps.
``upstream`` is sglang's torch-native decode, which copies keys and values out of its pool. ``dense`` is the
fastest attention here that reads them where they are. ``sparse`` scans, chooses, brings what has no slot from
the host, and attends. The query drifts from step to step, so that a part of the chosen pages changes.
``scan_of`` has the choices of other selectors on the same queries, so that scans are compared within a run.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]
# ruff: noqa: E402
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from benchmark.results import print_rows, write_results
from sgl_importance.sparse.selection_rule import SINK_TOKENS, WINDOW_TOKENS
from sgl_importance_kernels.sparse.bit_tables import CALIBRATION_TOKENS
from sgl_importance_kernels.sparse.page_choice import ChoiceRule
from sgl_importance_kernels.sparse.page_chooser import PageChooser
from sgl_importance_kernels.sparse.page_slots import PageSlots
from sgl_importance_kernels.sparse.representations import Representations
from sgl_importance_kernels.sparse.selectors.selector import Selector
from sgl_importance_kernels.sparse.step_attention import attend_step
from sgl_importance_kernels.sparse.streamed_attention import attend
from sgl_importance_lab.selectors.registry import ready_selector

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
SCALE = DIM**-0.5
STAGING_PAGES = 512 // PAGE
DRIFT = 0.2


class Layer:
    """A context in a tiered pool whose pages lie in any order.

    Args:
        context: tokens.
        selected: tokens that a step reads.
        selector: its name.
        beside: names of others, whose choices are timed alone.
    """

    def __init__(self, context: int, selected: int, selector: str, beside: Sequence[str] = ()) -> None:
        draws = torch.Generator().manual_seed(0)
        num_pages = context // PAGE
        tokens = (num_pages + 1) * PAGE
        self.context, self.max_pages = context, selected // PAGE
        self.keys, self.values = (torch.randn(tokens, KV_HEADS, DIM, generator=draws) for _ in range(2))
        self.pages = torch.randperm(num_pages, generator=draws) + 1
        self.slots = PageSlots(
            [self.keys],
            [self.values],
            num_frames=1,
            num_slots=2 * self.max_pages,
            page_size=PAGE,
            staging_pages=STAGING_PAGES,
            device="cpu",
            selector=self._ready(selector),
        )
        assert self.slots.representations is not None
        self.chooser = self._chooser(self.slots.representations)
        by_page = self.keys.unflatten(0, (-1, PAGE))
        self.beside = {
            name: self._chooser(Representations(self._ready(name), (by_page,), "cpu")) for name in beside
        }
        self.contexts = self.chooser.contexts(self.pages[None], [context], [self.max_pages])
        self.slots.representations.ensure(self.pages)
        for chooser in self.beside.values():
            chooser.choose(0, torch.zeros(1, HEADS, DIM), self.pages, context, self.max_pages)  # keeps all
        self.locations = (self.pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
        self.table = self.locations.int()[None]
        # As stock would lay out one request alone: the best case of attention without a copy.
        self.in_order = self.keys[self.locations], self.values[self.locations]
        self.upstream_backend = object.__new__(TorchNativeAttnBackend)

    def _ready(self, name: str) -> Selector:
        return ready_selector(name, self.keys[:CALIBRATION_TOKENS].unflatten(0, (-1, PAGE))[None])

    def _chooser(self, representations: Representations) -> PageChooser:
        rule = ChoiceRule(SINK_TOKENS, WINDOW_TOKENS)
        return PageChooser(representations, PAGE, rule, self.slots.traffic)

    def upstream(self, query: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(query)
        self.upstream_backend._run_sdpa_forward_decode(
            query,
            output,
            self.keys,
            self.values,
            self.table,
            torch.tensor([0]),
            torch.tensor([self.context]),
            scaling=SCALE,
            enable_gqa=True,
        )
        return output

    def dense(self, query: torch.Tensor) -> torch.Tensor:
        return attend(query, *self.in_order, SCALE)[0]

    def scan(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.chosen_by(self.chooser, query)

    def chosen_by(self, chooser: PageChooser, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return chooser.choose_step(0, query, torch.tensor([0]), SCALE, self.contexts)

    def sparse(self, query: torch.Tensor) -> torch.Tensor:
        self.slots.begin_pass(torch.zeros(1, dtype=torch.int64))
        chosen, _ = self.scan(query)
        places = self.slots.place(0, chosen, is_chosen=True)
        output, row = torch.empty_like(query), torch.tensor([0])
        attend_step(self.slots, 0, query, row, places, torch.tensor([PAGE]), SCALE, output)
        return output


def measured(layer: Layer, steps: int, label: str) -> dict[str, Any]:
    """Median milliseconds of each arm."""
    draws = torch.Generator().manual_seed(1)
    query = torch.randn(1, HEADS, DIM, generator=draws)
    arms: dict[str, Callable[[torch.Tensor], Any]] = {
        name: getattr(layer, name) for name in ("upstream", "dense", "scan", "sparse")
    }
    for name, chooser in layer.beside.items():
        arms[name] = partial(layer.chosen_by, chooser)
    times: dict[str, list[float]] = {name: [] for name in arms}
    torch.testing.assert_close(layer.upstream(query), layer.dense(query), atol=1e-4, rtol=1e-4)
    for _ in range(2):
        layer.sparse(query)
    traffic = layer.slots.traffic
    traffic.read = traffic.loaded = 0
    for _ in track(range(steps), description=label):
        drift = torch.randn(query.shape, generator=draws)
        query = math.sqrt(1 - DRIFT**2) * query + DRIFT * drift
        for name, arm in arms.items():
            start = time.process_time()
            arm(query)
            times[name].append(time.process_time() - start)
    middle = {name: 1000 * statistics.median(values) for name, values in times.items()}
    return {
        "context": layer.context,
        **{f"{name}_ms": value for name, value in middle.items() if name not in layer.beside},
        "scan_of": {name: middle["scan"] / middle[name] for name in layer.beside},
        "loaded_share": traffic.loaded / traffic.read,
        "times_upstream": middle["upstream"] / middle["sparse"],
        "times_dense": middle["dense"] / middle["sparse"],
    }


@torch.inference_mode()
def main(
    contexts: Annotated[str, typer.Option(help="Tokens, separated by commas.")] = "4096,16384,65536",
    selected: Annotated[int, typer.Option(help="Tokens that a step reads.")] = 2048,
    selector: Annotated[str, typer.Option(help="As --kv-sparse-selector.")] = "bits",
    beside: Annotated[str, typer.Option(help="Selectors whose scans are timed beside.")] = "rep,token",
    steps: Annotated[int, typer.Option(help="Steps of each arm.")] = 15,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    torch.set_num_threads(1)
    rows = []
    for context in map(int, contexts.split(",")):
        layer = Layer(context, selected, selector, beside.split(","))
        rows.append(
            {
                "selector": selector,
                "selected": selected,
                **measured(layer, steps, f"{context:,} tokens"),
            }
        )
        write_results("pages_layer", rows, out=out)
    print_rows("One layer, one request, milliseconds", rows)


if __name__ == "__main__":
    typer.run(main)
