"""sglang's torch-native attention over pages in tiers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_importance.options import ImportanceOptions
from sgl_importance.pages.selection_rule import read_all
from sgl_importance_kernels.pages.audit import audit
from sgl_importance_kernels.pages.page_chooser import PageChooser
from sgl_importance_kernels.pages.streamed_attention import (
    PartialAttention,
    attend_causally,
    stream_attention,
)
from sglang_importance.attention.sampling import ObservedQueries
from sglang_importance.attention.source import request_table
from sglang_importance.attention.torch_native import EmittingTorchNativeBackend
from sglang_importance.pages.pool import TieredKVPool
from sglang_importance.pages.selections import Selection

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

ChoiceListener = Callable[[slice, "RadixAttention", torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes rows of the batch, layer, pages of the context, those of them that were chosen, and their shares."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How tokens of a request choose among the pages of their context.

    Attributes:
        selection: of the request.
        position: of the first of them.
        max_pages: how many pages may be read.
        audited_layer: whose choice is compared with exact attention; None for none.
    """

    selection: Selection
    position: int
    max_pages: int
    audited_layer: int | None


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of a request in a forward pass that read the same pages.

    Attributes:
        rows: their rows in the batch's tensors.
        context: tokens in the pool that they attend to through pages.
        pages: those tokens' pages, in order; int64 [pages].
        is_causal: whether they attend to each other beside, as they are; else the context has them.
        choice: which of the pages they read; None for all.
    """

    rows: slice
    context: int
    pages: torch.Tensor
    is_causal: bool
    choice: Choice | None


class TieredTorchNativeBackend(TorchNativeAttnBackend):
    """Attention that holds no more of a context on the device than slots and staging buffer.

    Args:
        chooser: makes steps read the pages that it chooses; None where they read all.
        selecting_layers: those whose steps do; they are audited in turn.
    """

    token_to_kv_pool: TieredKVPool

    def __init__(
        self,
        model_runner: ModelRunner,
        chooser: PageChooser | None = None,
        selecting_layers: Collection[int] = (),
    ) -> None:
        super().__init__(model_runner)
        assert isinstance(self.token_to_kv_pool, TieredKVPool), "sglang built another pool"
        self._chooser = chooser
        self._selecting_layers = tuple(selecting_layers)
        self._read_all = read_all(self.token_to_kv_pool.page_size)
        self.on_choice: ChoiceListener | None = None
        self._spans: list[Span] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self.token_to_kv_pool.begin_pass(forward_batch.out_cache_loc)
        is_decode = forward_batch.forward_mode.is_decode()
        if is_decode:
            stops = forward_batch.seq_lens.tolist()
            starts = [stop - 1 for stop in stops]
        else:
            assert forward_batch.extend_prefix_lens is not None
            assert forward_batch.extend_seq_lens is not None
            starts = forward_batch.extend_prefix_lens.tolist()
            new = forward_batch.extend_seq_lens.tolist()
            stops = [start + tokens for start, tokens in zip(starts, new, strict=True)]
        rids = forward_batch.rids or []  # none in upstream's own dummy batches, nor of padding
        slots = forward_batch.req_pool_indices.tolist()
        table, page_size = request_table(self.req_to_token_pool), self.token_to_kv_pool.page_size
        self._spans = []
        row = 0
        for slot, rid, start, stop in zip_longest(slots, rids[: len(slots)], starts, stops):
            selection = self._selection(rid)
            rule = self._read_all if selection is None else selection.rule
            for span in rule.spans(start, stop):
                is_causal = not (is_decode or span.is_generated)
                context = span.start if is_causal else span.stop
                first = row + span.start - start
                self._spans.append(
                    Span(
                        rows=slice(first, first + span.stop - span.start),
                        context=context,
                        pages=table[slot, :context:page_size].long() // page_size,
                        is_causal=is_causal,
                        choice=self._choice(selection, span.start, context) if span.selects else None,
                    )
                )
            row += stop - start

    def _selection(self, rid: str | None) -> Selection | None:
        selections = self.token_to_kv_pool.selections
        return None if selections is None or rid is None else selections.of(rid)

    def _choice(self, selection: Selection | None, position: int, context: int) -> Choice:
        assert selection is not None
        rule, trail = selection.rule, selection.trail
        turn = trail.turn(position)
        layers = self._selecting_layers
        return Choice(
            selection,
            position,
            max_pages=rule.max_pages(context, trail.budget_factor(position)),
            # Where turns begin differs between prompts: short answers have one audit each, in any layer.
            audited_layer=layers[(turn + rule.prompt_tokens) % len(layers)]
            if layers and turn is not None
            else None,
        )

    def forward_extend(  # type: ignore[override]  # only what is understood: no other keywords
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As upstream's; models that cap their logits are refused at launch.

        Raises:
            NotImplementedError: the layer brings learnt sinks, which only its call tells.
        """
        if sinks is not None:
            raise NotImplementedError("tiered pages have no learnt sinks: use --kv-residency full")
        assert save_kv_cache, "tiered pages need every layer's own keys and values in the pool"
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        heads = layer.tp_q_head_num
        queries = q.reshape(-1, heads, layer.qk_head_dim)
        output = q.new_empty(q.shape[0], heads * layer.v_head_dim)
        results = output.view(-1, heads, layer.v_head_dim)
        for span in self._attend_together(queries, layer, results):
            rows = span.rows
            sums = self._read_pages(queries[rows], span, layer)
            if span.is_causal:
                sums.add(*attend_causally(queries[rows], k[rows], v[rows], layer.scaling))
            results[rows] = sums.output.to(output.dtype)
        return output

    # What sets a decode step apart is in its spans, which are made before the first layer.
    forward_decode = forward_extend

    def _attend_together(
        self, queries: torch.Tensor, layer: RadixAttention, results: torch.Tensor
    ) -> Sequence[Span]:
        """Computes what can be computed for many requests at once; the spans that are left, one by one."""
        return self._spans

    def _read_pages(self, queries: torch.Tensor, span: Span, layer: RadixAttention) -> PartialAttention:
        pool = self.token_to_kv_pool
        index = layer.layer_id - pool.start_layer
        pages, context, choice = span.pages, span.context, span.choice
        shares = None
        if self._chooser and choice is not None and layer.layer_id in self._selecting_layers:
            pages, shares = self._chooser.choose(
                index, queries * layer.scaling, pages, context, choice.max_pages
            )
            choice.selection.candidates += len(span.pages)
            choice.selection.selected += len(pages)
            if self.on_choice is not None and shares is not None:
                self.on_choice(span.rows, layer, span.pages, pages, shares)
            # The last page is among them: it alone may be partial.
            context -= (len(span.pages) - len(pages)) * pool.page_size
        sums = PartialAttention()
        stream_attention(sums, queries, pool.slots, index, pages, context, layer.scaling, shares)
        return self._audited(sums, pages, queries, span, layer)

    def _audited(
        self,
        sums: PartialAttention,
        pages: torch.Tensor,
        queries: torch.Tensor,
        span: Span,
        layer: RadixAttention,
    ) -> PartialAttention:
        """The attention to chosen pages; where an audit is due, and says so, the exact one in its place."""
        choice, pool = span.choice, self.token_to_kv_pool
        if choice is None or choice.audited_layer != layer.layer_id:
            return sums
        trail = choice.selection.trail
        if len(pages) == len(span.pages):
            trail.audited(choice.position, missed_mass=0.0, missed_page=0.0, output_error=0.0)
            return sums
        index = layer.layer_id - pool.start_layer
        found = audit(sums, pages, queries, pool.slots, index, span.pages, span.context, layer.scaling)
        is_replaced = trail.audited(
            choice.position,
            missed_mass=found.missed_mass,
            missed_page=found.missed_page,
            output_error=found.output_error,
        )
        return found.exact if is_replaced else sums


class EmittingTieredBackend(EmittingTorchNativeBackend, TieredTorchNativeBackend):
    """The same with page scores, which are computed from the keys on the host.

    Only tokens that read all pages are observed: those that choose say nothing of the pages that they leave
    out, and queries above a layer that chose are not those of the model.

    Args:
        options: as ``EmittingTorchNativeBackend`` takes them.
        chooser: as ``TieredTorchNativeBackend`` takes it.
        selecting_layers: likewise.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        options: ImportanceOptions,
        chooser: PageChooser | None = None,
        selecting_layers: Collection[int] = (),
    ) -> None:
        super().__init__(model_runner, options)
        self._chooser, self._selecting_layers = chooser, tuple(selecting_layers)

    def _observed(self, forward_batch: ForwardBatch) -> list[ObservedQueries]:
        choosing = [span.rows for span in self._spans if span.choice is not None]
        observed = super()._observed(forward_batch)
        return [cut for each in observed if (cut := _before(each, choosing)) is not None]


def _before(observed: ObservedQueries, choosing: Sequence[slice]) -> ObservedQueries | None:
    """The observed tokens of a request before the first that chooses; None where there are none.

    Args:
        choosing: rows that choose. Those of a request stand behind its others.
    """
    rows = observed.rows
    starts = [each.start for each in choosing if each.start < rows.stop and rows.start < each.stop]
    left_out = rows.stop - max(min(starts, default=rows.stop), rows.start)
    if left_out == observed.num_q:
        return None
    kept = slice(rows.start, rows.stop - left_out)
    return replace(observed, rows=kept, seq_len=observed.seq_len - left_out)
