"""Attention over pages in tiers in Triton: the requests of a decode step choose and read pages together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sgl_importance_kernels.pages.page_choice import ChoiceRule, Contexts, choose_pages
from sgl_importance_kernels.pages.page_chooser import PageChooser
from sgl_importance_kernels.pages.streamed_attention import PartialAttention
from sgl_importance_kernels.pages.triton.attention_kernel import attend_places
from sglang_importance.pages.torch_native_backend import Span, TieredTorchNativeBackend

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class _Step:
    """The tokens of a forward pass that choose among more pages than they may read, one a request.

    Attributes:
        spans: of these tokens.
        rows: theirs in the batch's tensors, int64 [spans].
        contexts: what they choose from.
        last_tokens: tokens of the page that each is filling, or of a whole one; int64 [spans].
        chosen: how many pages they have chosen so far, over layers, int64 [spans].
    """

    spans: Sequence[Span]
    rows: torch.Tensor
    contexts: Contexts
    last_tokens: torch.Tensor
    chosen: torch.Tensor


class TieredTritonBackend(TieredTorchNativeBackend):
    """The same attention, with kernels that a GPU can run.

    A token that chooses is computed together with those of other requests, whatever pass it is in; from the
    scan to the output nothing waits for the device. All others are computed request by request.

    Args:
        chooser: makes steps read the pages that it chooses; None where they read all.
        rule: what holds for every choice.
        selecting_layers: those whose steps do; they are audited in turn.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        chooser: PageChooser | None = None,
        rule: ChoiceRule | None = None,
        selecting_layers: Collection[int] = (),
    ) -> None:
        super().__init__(model_runner, chooser, selecting_layers)
        self._rule = rule
        self._step: _Step | None = None
        self._alone: list[Span] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        together: list[Span] = []
        self._alone = []
        for span in self._spans:
            (together if self._chooses_together(span) else self._alone).append(span)
        self._step = self._step_of(together) if together else None

    def _chooses_together(self, span: Span) -> bool:
        representations = self.token_to_kv_pool.slots.representations
        return (
            representations is not None
            and representations.selector.product is not None
            and span.choice is not None
            and not span.is_causal
            and span.rows.stop - span.rows.start == 1
            and span.choice.max_pages < len(span.pages)
        )

    def _step_of(self, spans: Sequence[Span]) -> _Step:
        pool, rule = self.token_to_kv_pool, self._rule
        assert rule is not None
        size, device = pool.page_size, pool.slots.keys.device
        contexts = Contexts.of(
            [span.pages for span in spans],
            [span.context for span in spans],
            [span.choice.max_pages for span in spans if span.choice is not None],
            rule,
            size,
        )
        # Those of a page that this pass completes are built when its last token is written.
        assert pool.slots.representations is not None
        pool.slots.representations.ensure(
            torch.cat([span.pages[: (span.context - 1) // size] for span in spans])
        )
        return _Step(
            spans,
            rows=torch.tensor([span.rows.start for span in spans], device=device),
            contexts=contexts,
            last_tokens=(contexts.num_tokens - 1) % size + 1,
            chosen=torch.zeros(len(spans), dtype=torch.int64, device=device),
        )

    def _attend_together(
        self, queries: torch.Tensor, layer: RadixAttention, results: torch.Tensor
    ) -> Sequence[Span]:
        step = self._step
        if step is None or layer.layer_id not in self._selecting_layers:
            return self._spans
        pool = self.token_to_kv_pool
        slots, index = pool.slots, layer.layer_id - pool.start_layer
        of_rows = queries[step.rows]
        pages, shares = self._choose(step, of_rows * layer.scaling, index)
        places = slots.place_step(index, pages, shares)
        outputs, log_sums = attend_places(
            of_rows.contiguous(),
            (slots.keys[index], slots.values[index]),
            slots.host[index],
            places,
            step.last_tokens,
            layer.scaling,
        )
        step.chosen.add_((pages >= 0).sum(dim=1))
        for row, span in enumerate(step.spans):
            assert span.choice is not None
            if span.choice.audited_layer == layer.layer_id:
                sums = PartialAttention()
                sums.add(outputs[row : row + 1], log_sums[row : row + 1])
                read = pages[row][pages[row] >= 0]
                exact = self._audited(sums, read, of_rows[row : row + 1], span, layer)
                outputs[row : row + 1] = exact.output
        results[step.rows] = outputs.to(results.dtype)
        if layer.layer_id == self._selecting_layers[-1]:
            self._count(step)
        return self._alone

    def _choose(self, step: _Step, queries: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages and shares, [spans, 1 + most chosen]; the page that is being filled comes first."""
        slots, contexts, rule = self.token_to_kv_pool.slots, step.contexts, self._rule
        assert slots.representations is not None
        assert rule is not None
        logits = slots.representations.step_logits(
            index, queries.float().contiguous(), contexts.pages, contexts.num_complete
        )
        unit_pages = max(1, slots.representations.selector.unit_tokens // contexts.page_size)
        bonus = rule.bonus(slots.is_resident(index, contexts.pages)) if rule.resident_bias else None
        pages, shares = choose_pages(logits, contexts, rule, unit_pages=unit_pages, bonus=bonus)
        partial = contexts.partial_page[:, None]
        return torch.cat([partial, pages], dim=1), torch.cat([torch.zeros_like(shares[:, :1]), shares], dim=1)

    def _count(self, step: _Step) -> None:
        """Counts the step behind its last layer, where the device has nothing left to wait for."""
        slots, layers = self.token_to_kv_pool.slots, len(self._selecting_layers)
        slots.settle()
        for span, chosen in zip(step.spans, step.chosen.tolist(), strict=True):
            assert span.choice is not None
            candidates = layers * len(span.pages)
            span.choice.selection.candidates += candidates
            span.choice.selection.selected += chosen
            slots.traffic.candidates += candidates
            slots.traffic.selected += chosen
