"""Attention over pages in tiers that brings page scores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance_kernels.sparse.page_chooser import PageChooser
from sglang_importance.attention.sampling import ObservedQueries
from sglang_importance.attention.torch_native import EmittingTorchNativeBackend
from sglang_importance.sparse.tiered_backend import TieredAttentionBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class EmittingTieredBackend(EmittingTorchNativeBackend, TieredAttentionBackend):
    """The same with page scores, which are computed from the keys on the host.

    Only tokens that read all pages are observed: those that choose say nothing of the pages that they leave
    out, and queries above a layer that chose are not those of the model.

    Args:
        options: as ``EmittingTorchNativeBackend`` takes them.
        chooser: as ``TieredAttentionBackend`` takes it.
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
