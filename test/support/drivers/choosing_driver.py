"""The attention of a model runner whose tokens choose among pages, without the model."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sgl_importance.sparse.device_plan import plan_device
from sgl_importance.sparse.selection_rule import Selection
from sgl_importance_kernels.sparse.page_choice import ChoiceRule
from sgl_importance_kernels.sparse.page_chooser import PageChooser
from sgl_importance_kernels.sparse.selectors.registry import SELECTORS
from sglang_importance.sparse.emitting_backend import EmittingTieredBackend
from sglang_importance.sparse.selections import Selections

from support.drivers.attention_driver import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    KV_SHAPE,
    NUM_LAYERS,
    POOL_TOKENS,
    AttentionDriver,
    Sequence,
    options,
    tiered_pool,
)

PAGE, PROMPT = 16, 80
RULE = ChoiceRule(sink_tokens=PAGE, window_tokens=PAGE)


class ChoosingDriver(AttentionDriver):
    """Forward passes through a backend that chooses two or three of at most six pages, in every layer."""

    def __init__(self, *, window: int = 4, min_context: int = 0, prompt_tokens: int = 0) -> None:
        sparse = {"sparse.selector": "token", "sparse.budget": 2.0 * PAGE, "tiered.residency": "tiered"}
        positions = {"sparse.min_context": min_context, "sparse.prompt_tokens": prompt_tokens}
        super().__init__(options(window=window, **sparse, **positions), page_size=PAGE)
        selector, self.selections = SELECTORS["token"](PAGE), Selections(self.options, PAGE)
        pool = tiered_pool(PAGE)
        plan = plan_device(
            KV_SHAPE,
            page_size=PAGE,
            pool_tokens=POOL_TOKENS,
            device_tokens=600,
            max_requests=2,
            kept_bytes=selector.kept_bytes(HEAD_DIM),
        )
        pool.attach_slots(plan, "cpu", selector, self.selections)
        self.runner.token_to_kv_pool = pool
        assert pool.slots.representations is not None
        chooser = PageChooser(pool.slots.representations, PAGE, RULE, pool.slots.traffic)
        self.backend = EmittingTieredBackend(self.runner, self.options, chooser, range(NUM_LAYERS))
        self.rows = self.backend.rows
        self.outputs: list[torch.Tensor] = []  # of every layer of every pass
        self._requests: list[SimpleNamespace] = []  # which hold the selections

    def begin(self, sequence: Sequence, *, reads_all: bool = False) -> Selection:
        req = SimpleNamespace(rid=sequence.rid, origin_input_ids=[0] * PROMPT)
        self._requests.append(req)
        return self.selections.open(req, reads_all=reads_all, budget=None)  # type: ignore[arg-type]

    def _run_model(self, batch: ForwardBatch) -> SimpleNamespace:
        self.backend.init_forward_metadata(batch)
        for layer in self.layers:
            q, k, v = (
                torch.randn(len(batch.out_cache_loc), heads * HEAD_DIM, generator=self.random)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            heads = k.view(-1, KV_HEADS, HEAD_DIM), v.view(-1, KV_HEADS, HEAD_DIM)
            self.outputs.append(self.backend.forward(q, *heads, layer, batch))
            self._remember(self._chunks, layer.layer_id, q.view(-1, HEADS, HEAD_DIM), heads[0])
        return SimpleNamespace(can_run_graph=False)
