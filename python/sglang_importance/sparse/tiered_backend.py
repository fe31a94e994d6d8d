"""Attention over pages in tiers: by kernels compiled for CPUs, or by Triton's, as the pool says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sgl_importance.options.importance_options import name_of
from sgl_importance.sparse.selection_rule import Selection, read_all
from sgl_importance_kernels.sparse.page_chooser import PageChooser
from sgl_importance_kernels.sparse.step_attention import attend_step, can_attend_in_place
from sgl_importance_kernels.sparse.streamed_attention import (
    PartialAttention,
    attend_causally,
    stream_attention,
)
from sglang_importance.attention.source import request_table
from sglang_importance.sparse.decode_step import Choice, DecodeStep, Span, choosing_parts, parts
from sglang_importance.sparse.pool import TieredKVPool
from sglang_importance.upstream.refusal import LaunchRefused

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

ChoiceListener = Callable[[slice, "RadixAttention", torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes rows of the batch, layer, pages of the context, those of them that were chosen, and their shares."""


class TieredAttentionBackend(TorchNativeAttnBackend):
    """Attention that holds no more of a context on the device than slots and staging buffer.

    Tokens of answers are computed together, whatever pass they are in. Those of prompts read their pages
    through the staging buffer, request by request.

    Args:
        chooser: makes steps read the pages that it chooses; None where they read all.
        selecting_layers: those whose steps do.
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
        self._alone: list[Span] = []
        self._steps: list[DecodeStep] = []
        self._ensured: WeakSet[Selection] = WeakSet()  # whose pages are all represented
        self._ensured_at = -1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        raise LaunchRefused(
            [
                f"{name_of('tiered.residency')} tiered has no CUDA graphs where layers read everything: "
                "add --disable-cuda-graph"
            ]
        )

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        is_decode = forward_batch.forward_mode.is_decode()
        if is_decode:
            stops = on_host(forward_batch.seq_lens_cpu, forward_batch.seq_lens)
            starts = [stop - 1 for stop in stops]
            self.token_to_kv_pool.begin_step(forward_batch.out_cache_loc, stops)
        else:
            self.token_to_kv_pool.begin_pass(forward_batch.out_cache_loc)
            starts = on_host(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_prefix_lens)
            new = on_host(forward_batch.extend_seq_lens_cpu, forward_batch.extend_seq_lens)
            stops = [start + tokens for start, tokens in zip(starts, new, strict=True)]
        rids = forward_batch.rids or []  # none in upstream's own dummy batches, nor of padding
        table = self._page_table(forward_batch.req_pool_indices, stops)
        self._spans = []
        row = 0
        for request, (rid, start, stop) in enumerate(zip_longest(rids[: len(stops)], starts, stops)):
            self._spans += self._spans_of(request, rid, start, stop, row, table[request], is_decode=is_decode)
            row += stop - start
        self._divide(table)

    def _page_table(self, requests: torch.Tensor, stops: Sequence[int]) -> torch.Tensor:
        """Pages of requests of the pool, int64 [requests, most pages]; anything behind their last."""
        size = self.token_to_kv_pool.page_size
        firsts = request_table(self.req_to_token_pool)[:, : max(stops, default=0) : size]
        return firsts[requests].long() // size

    def _spans_of(
        self,
        request: int,
        rid: str | None,
        start: int,
        stop: int,
        row: int,
        pages: torch.Tensor,
        *,
        is_decode: bool,
    ) -> list[Span]:
        """Spans of a request's tokens from ``start`` to ``stop``; the first is row ``row`` of the batch."""
        selection = self._selection(rid)
        rule = self._read_all if selection is None else selection.rule
        spans = []
        for span in rule.spans(start, stop):
            is_causal = not (is_decode or span.is_generated)
            context = span.start if is_causal else span.stop
            first = row + span.start - start
            spans.append(
                Span(
                    rows=slice(first, first + span.stop - span.start),
                    request=request,
                    context=context,
                    pages=pages[: -(-context // self.token_to_kv_pool.page_size)],
                    is_causal=is_causal,
                    choice=_choice(selection, context) if span.selects else None,
                )
            )
        return spans

    def _divide(self, table: torch.Tensor) -> None:
        """Tells the spans that are computed together from those that are computed alone.

        Args:
            table: pages of each request of the batch, int64 [requests, most pages].
        """
        pool = self.token_to_kv_pool
        choosing: list[Span] = []
        reading: list[Span] = []
        self._alone = []
        for span in self._spans:
            if span.is_causal or span.rows.stop - span.rows.start > 1 or not can_attend_in_place(pool.slots):
                self._alone.append(span)
            elif span.choice is not None and span.choice.max_pages < len(span.pages):
                choosing.append(span)
            else:
                reading.append(span)
        self._steps = []
        for part in choosing_parts(choosing):
            self._ensure(part)
            self._steps.append(DecodeStep.of(part, table, pool.page_size, self._chooser))
        self._steps += [DecodeStep.of(part, table, pool.page_size, None) for part in parts(reading)]
        self._count()

    def _ensure(self, spans: Sequence[Span]) -> None:
        """Builds what a selector wants of the spans' pages.

        The device is asked only where some may be missing: for a request that has not chosen yet, and when
        pages were forgotten since.
        """
        representations, size = self.token_to_kv_pool.slots.representations, self.token_to_kv_pool.page_size
        assert representations is not None
        if representations.times_forgotten != self._ensured_at:
            self._ensured, self._ensured_at = WeakSet(), representations.times_forgotten
        selections = [span.choice.selection for span in spans if span.choice is not None]
        if all(selection in self._ensured for selection in selections):
            return
        # Those of a page that this pass completes are built when its last token is written.
        representations.ensure(torch.cat([span.pages[: (span.context - 1) // size] for span in spans]))
        self._ensured.update(selections)

    def _selection(self, rid: str | None) -> Selection | None:
        selections = self.token_to_kv_pool.selections
        return None if selections is None or rid is None else selections.of(rid)

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
        for step in self._steps:
            self._attend_step(step, queries, layer, results)
        for span in self._alone:
            rows = span.rows
            sums = self._read_pages(queries[rows], span, layer)
            if span.is_causal:
                sums.add(*attend_causally(queries[rows], k[rows], v[rows], layer.scaling))
            results[rows] = sums.output.to(output.dtype)
        return output

    # What sets a decode step apart is in its spans, which are made before the first layer.
    forward_decode = forward_extend

    def _attend_step(
        self, step: DecodeStep, queries: torch.Tensor, layer: RadixAttention, results: torch.Tensor
    ) -> None:
        """Computes a step's rows in one layer."""
        slots, index = self.token_to_kv_pool.slots, layer.layer_id - self.token_to_kv_pool.start_layer
        pages, shares = step.everything, None
        if layer.layer_id in self._selecting_layers and step.contexts is not None:
            assert self._chooser is not None
            pages, shares = self._chooser.choose_step(index, queries, step.rows, layer.scaling, step.contexts)
        places = slots.place(index, pages, is_chosen=shares is not None)
        attend_step(slots, index, queries, step.rows, places, step.last_tokens, layer.scaling, results)
        if shares is None or self.on_choice is None:
            return
        for row, span in enumerate(step.spans):
            is_read = pages[row].roll(-1) >= 0
            read, of_read = pages[row].roll(-1)[is_read], shares[row].roll(-1)[is_read]
            self.on_choice(span.rows, layer, span.pages, read, of_read)

    def _count(self) -> None:
        """Counts the steps of a pass before its first layer: the host knows how much each layer reads."""
        for step in self._steps:
            everything = [len(span.pages) for span in step.spans]
            self._count_spans(step.spans, everything if step.contexts is None else step.contexts.num_read)

    def _count_spans(self, spans: Sequence[Span], num_read: Sequence[int]) -> None:
        slots, layers = self.token_to_kv_pool.slots, len(self._selecting_layers)
        for span, read in zip(spans, num_read, strict=True):
            if span.choice is None:
                continue
            candidates, selected = layers * len(span.pages), layers * read
            span.choice.selection.candidates += candidates
            span.choice.selection.selected += selected
            slots.traffic.candidates += candidates
            slots.traffic.selected += selected

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
        stream_attention(
            sums, queries, pool.slots, index, pages, context, layer.scaling, is_chosen=shares is not None
        )
        return sums


def _choice(selection: Selection | None, context: int) -> Choice:
    assert selection is not None
    return Choice(selection, selection.rule.max_pages(context))


def on_host(known: Sequence[int] | torch.Tensor | None, asked: torch.Tensor | None) -> list[int]:
    """Numbers that the host knows; those that it must ask the device for where it does not."""
    if known is None:
        assert asked is not None, "a batch that does not say how long its requests are"
        known = asked
    return known.tolist() if isinstance(known, torch.Tensor) else list(known)
