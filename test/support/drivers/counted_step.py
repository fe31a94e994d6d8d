"""One decode step through the attention of tiered pages, as a server has it, counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.sparse.device_plan import KvShape, plan_device
from sgl_importance_kernels.sparse.page_choice import ChoiceRule
from sgl_importance_kernels.sparse.page_chooser import PageChooser
from sgl_importance_lab.selectors.registry import ready_selector
from sglang_importance.sparse.captured_backend import CapturedTieredBackend
from sglang_importance.sparse.pool import TieredKVPool
from sglang_importance.sparse.selections import Selections

from support.device_counts import DeviceCounts

PAGE, LAYERS, HEADS, KV_HEADS, DIM = 16, 4, 4, 2, 16
BUDGET = 128  # tokens that a step reads


@dataclass(frozen=True)
class StepCounts:
    """Of what is done once a pass, and in all layers together."""

    of_pass: DeviceCounts
    of_layers: DeviceCounts


class CountedStep:
    """Requests of equal contexts in the middle of a page.

    Args:
        batch: requests.
        context: tokens of each, with the one of the step.
        selector: as ``--kv-sparse-selector``.
        device: where slots and tables are.
        min_context: tokens of a context below which all of it is read.
    """

    def __init__(
        self, batch: int, context: int, selector: str, device: str = "cpu", min_context: int = 0
    ) -> None:
        per_request = -(-(context + 4) // PAGE)
        pool_tokens = (batch * per_request + 1) * PAGE
        self.batch, self.context, self.device = batch, context, device
        self.pool = TieredKVPool(
            pool_tokens,
            page_size=PAGE,
            dtype=torch.float32,
            head_num=KV_HEADS,
            head_dim=DIM,
            layer_num=LAYERS,
            device=device,
            enable_memory_saver=False,
        )
        options = ImportanceOptions.of(
            {
                "policy": "importance",
                "source": "none",
                "tiered.residency": "tiered",
                "sparse.selector": selector,
                "sparse.budget": float(BUDGET),
                "sparse.min_context": min_context,
            }
        )
        shape = KvShape(layers=LAYERS, kv_heads=KV_HEADS, key_dim=DIM, value_dim=DIM, item_bytes=4)
        self.random = torch.Generator().manual_seed(0)
        keys = torch.randn(LAYERS, 8, PAGE, KV_HEADS, DIM, generator=self.random)
        chosen_by = ready_selector(selector, keys, device)
        plan = plan_device(
            shape,
            page_size=PAGE,
            pool_tokens=pool_tokens,
            device_tokens=4 * pool_tokens + 8192,
            max_requests=batch,
            kept_bytes=chosen_by.kept_bytes(DIM),
            table_bytes=chosen_by.table_bytes(LAYERS, KV_HEADS, DIM),
            uses_triton=True,
        )
        self.selections = Selections(options, PAGE)
        self.pool.attach_slots(plan, device, chosen_by, self.selections, uses_triton=True)
        slots = self.pool.slots
        assert slots.representations is not None
        rule = ChoiceRule(sink_tokens=PAGE, window_tokens=2 * PAGE)
        chooser = PageChooser(slots.representations, PAGE, rule, slots.traffic)
        self.layers = [RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id=i) for i in range(LAYERS)]
        table = ReqToTokenPool(batch + 1, per_request * PAGE, device, enable_memory_saver=False)
        runner = SimpleNamespace(
            device=device,
            page_size=PAGE,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            req_to_token_pool=table,
            token_to_kv_pool=self.pool,
        )
        self.backend = CapturedTieredBackend(runner, chooser, range(LAYERS), options.sparse)  # type: ignore[arg-type]
        self.requests = [SimpleNamespace(rid=str(at), origin_input_ids=[0] * 8) for at in range(batch)]
        for request in self.requests:
            self.selections.open(request, reads_all=False, budget=None)  # type: ignore[arg-type]
        pages = 1 + torch.randperm(batch * per_request, generator=self.random).view(batch, per_request)
        self.locations = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1).to(device)
        table.req_to_token[: batch + 1].zero_()
        table.req_to_token[:batch, : per_request * PAGE] = self.locations.int()

    def _batch(self, lengths: Sequence[int]) -> ForwardBatch:
        rows, seq_lens = torch.arange(self.batch, device=self.device), torch.tensor(lengths)
        on_device = seq_lens.to(self.device)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=self.batch,
            input_ids=torch.zeros_like(rows),
            rids=[request.rid for request in self.requests],
            req_pool_indices=rows,
            seq_lens=on_device,
            seq_lens_cpu=seq_lens,
            seq_lens_sum=sum(lengths),
            out_cache_loc=self.locations[rows, on_device - 1],
        )

    def replayed(self, lengths: Sequence[int], rows: int, locations: torch.Tensor) -> SimpleNamespace:
        """What upstream tells a backend before a graph of so many rows is captured or replayed.

        Args:
            lengths: tokens of each request; rows behind them are padding.
            rows: of the graph.
            locations: of the new tokens: of the requests', or, to be captured, of all rows.
        """
        padding = rows - len(lengths)
        seq_lens = torch.tensor([*lengths, *[1] * padding])
        requests = torch.tensor([*range(len(lengths)), *[0] * padding], device=self.device)
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=rows,
            num_padding=padding,
            req_pool_indices=requests,
            seq_lens=seq_lens.to(self.device),
            seq_lens_cpu=seq_lens,
            out_cache_loc=locations,
        )

    def batch_of(self, lengths: Sequence[int]) -> ForwardBatch:
        """The batch of a step of so many tokens each."""
        return self._batch(lengths)

    def _fill(self, lengths: Sequence[int]) -> None:
        """The contexts before the step, written as prompts are; the pages themselves are not copied."""
        with DeviceCounts().counting():
            self.fill(lengths)

    def fill(self, lengths: Sequence[int]) -> None:
        """Contexts of so many tokens, written as prompts are."""
        slots = self.pool.slots
        for row, length in enumerate(lengths):
            at = self.locations[row, :length]
            plan = slots.begin_pass(at)
            for layer in range(LAYERS):
                keys, values = (self._drawn(length, KV_HEADS, DIM) for _ in range(2))
                slots.write(layer, plan, keys, values)

    def inputs(self, rows: int | None = None) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Drawn queries, keys and values of a step's tokens, by layer: of the requests, or of more rows."""
        rows = self.batch if rows is None else rows
        return [
            (
                self._drawn(rows, HEADS * DIM),
                self._drawn(rows, KV_HEADS, DIM),
                self._drawn(rows, KV_HEADS, DIM),
            )
            for _ in self.layers
        ]

    def _drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.device)

    def begin(self, lengths: Sequence[int], of_pass: DeviceCounts) -> ForwardBatch:
        """What is done once for a step of so many tokens each."""
        batch = self._batch(lengths)
        assert batch.seq_lens_cpu is not None
        of_pass.on_host(batch.seq_lens_cpu, self.pool.slots.late.arrived)
        with of_pass.counting():
            self.backend.init_forward_metadata(batch)
        return batch

    def run_layers(
        self,
        inputs: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        batch: ForwardBatch,
        of_layers: DeviceCounts,
    ) -> list[torch.Tensor]:
        """Outputs of all layers."""
        with of_layers.counting():
            return [
                self.backend.forward_decode(q, k, v, layer, batch)
                for (q, k, v), layer in zip(inputs, self.layers, strict=True)
            ]

    def count(self) -> StepCounts:
        """Counts a step behind another one: pages of the first are in slots, what it built is built."""
        lengths = [self.context] * self.batch
        self._fill([length - 2 for length in lengths])
        self.run_layers(self.inputs(), self.begin([n - 1 for n in lengths], DeviceCounts()), DeviceCounts())
        counts = StepCounts(DeviceCounts(), DeviceCounts())
        self.run_layers(self.inputs(), self.begin(lengths, counts.of_pass), counts.of_layers)
        return counts
