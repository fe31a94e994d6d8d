"""One decode step through the attention of tiered pages, as a server has it, counted."""

from __future__ import annotations

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
from sgl_importance_kernels.sparse.page_slots import PageSlots
from sgl_importance_lab.selectors.registry import ready_selector
from sglang_importance.sparse.pool import TieredKVPool
from sglang_importance.sparse.selections import Selections
from sglang_importance.sparse.tiered_backend import TieredAttentionBackend

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
        policy: as ``--kv-residency-policy``.
    """

    def __init__(self, batch: int, context: int, selector: str, policy: str = "lru") -> None:
        per_request = -(-(context + 4) // PAGE)
        pool_tokens = (batch * per_request + 1) * PAGE
        self.batch, self.context = batch, context
        self.pool = TieredKVPool(
            pool_tokens,
            page_size=PAGE,
            dtype=torch.float32,
            head_num=KV_HEADS,
            head_dim=DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        options = ImportanceOptions.of(
            {
                "policy": "importance",
                "source": "none",
                "tiered.residency": "tiered",
                "sparse.selector": selector,
                "sparse.budget": float(BUDGET),
                "sparse.min_context": 0,
                "sparse.audit_interval": 0,
            }
        )
        shape = KvShape(layers=LAYERS, kv_heads=KV_HEADS, key_dim=DIM, value_dim=DIM, item_bytes=4)
        self.random = torch.Generator().manual_seed(0)
        keys = torch.randn(LAYERS, 8, PAGE, KV_HEADS, DIM, generator=self.random)
        chosen_by = ready_selector(selector, keys)
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
        self.pool.attach_slots(plan, "cpu", policy, chosen_by, self.selections, uses_triton=True)  # type: ignore[arg-type]
        slots = self.pool.slots
        assert slots.representations is not None
        rule = ChoiceRule(sink_tokens=PAGE, window_tokens=2 * PAGE)
        chooser = PageChooser(slots.representations, PAGE, rule, slots.traffic, is_resident=slots.is_resident)
        self.layers = [RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id=i) for i in range(LAYERS)]
        table = ReqToTokenPool(batch + 1, per_request * PAGE, "cpu", enable_memory_saver=False)
        runner = SimpleNamespace(
            device="cpu",
            page_size=PAGE,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            req_to_token_pool=table,
            token_to_kv_pool=self.pool,
        )
        self.backend = TieredAttentionBackend(runner, chooser, range(LAYERS))  # type: ignore[arg-type]
        self.requests = [SimpleNamespace(rid=str(at), origin_input_ids=[0] * 8) for at in range(batch)]
        for request in self.requests:
            self.selections.open(request, reads_all=False, budget=None)  # type: ignore[arg-type]
        pages = 1 + torch.randperm(batch * per_request, generator=self.random).view(batch, per_request)
        self.locations = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)
        table.req_to_token[: batch + 1].zero_()
        table.req_to_token[:batch, : per_request * PAGE] = self.locations.int()

    def _batch(self, length: int) -> ForwardBatch:
        rows = torch.arange(self.batch)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=self.batch,
            input_ids=torch.zeros(self.batch, dtype=torch.int64),
            rids=[request.rid for request in self.requests],
            req_pool_indices=rows,
            seq_lens=torch.full((self.batch,), length),
            seq_lens_cpu=torch.full((self.batch,), length),
            seq_lens_sum=self.batch * length,
            out_cache_loc=self.locations[:, length - 1].contiguous(),
        )

    def _fill(self, length: int) -> None:
        """The context before the step, written as prompts are; the pages themselves are not copied."""
        slots = self.pool.slots
        with DeviceCounts().counting():
            self._fill_rows(slots, length)

    def _fill_rows(self, slots: PageSlots, length: int) -> None:
        for row in range(self.batch):
            at = self.locations[row, :length]
            plan = slots.begin_pass(at)
            for layer in range(LAYERS):
                keys, values = (torch.randn(length, KV_HEADS, DIM, generator=self.random) for _ in range(2))
                slots.write(layer, plan, keys, values)

    def _layer(self, layer: RadixAttention, batch: ForwardBatch) -> torch.Tensor:
        q, k, v = (
            torch.randn(self.batch, heads, DIM, generator=self.random)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        return q.flatten(1), k, v  # type: ignore[return-value]

    def run(self, length: int, of_pass: DeviceCounts, of_layers: DeviceCounts) -> list[torch.Tensor]:
        """A step of so many tokens each; its outputs by layer."""
        batch = self._batch(length)
        assert batch.seq_lens_cpu is not None
        for counts in (of_pass, of_layers):
            counts.on_host(batch.seq_lens_cpu, self.pool.slots.late.arrived)
        inputs = [self._layer(layer, batch) for layer in self.layers]
        with of_pass.counting():
            self.backend.init_forward_metadata(batch)
        outputs = []
        with of_layers.counting():
            for (q, k, v), layer in zip(inputs, self.layers, strict=True):
                outputs.append(self.backend.forward_decode(q, k, v, layer, batch))
        return outputs

    def count(self) -> StepCounts:
        """Counts a step behind another one: pages of the first are in slots, what it built is built."""
        self._fill(self.context - 2)
        self.run(self.context - 1, DeviceCounts(), DeviceCounts())
        counts = StepCounts(DeviceCounts(), DeviceCounts())
        self.run(self.context, counts.of_pass, counts.of_layers)
        return counts
