"""Decode steps over tiered pages that CUDA graphs replay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

from sgl_importance.options.tiered_options import SparseOptions
from sgl_importance.sparse.selection_rule import SelectionRule
from sgl_importance_kernels.sparse.page_choice import MOST_PAGES
from sgl_importance_kernels.sparse.page_chooser import PageChooser
from sglang_importance.attention.source import request_table
from sglang_importance.sparse.captured_steps import CapturedSteps
from sglang_importance.sparse.tiered_backend import TieredAttentionBackend, on_host

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

CAN_RUN_GRAPH = (
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph"
)


class CapturedTieredBackend(TieredAttentionBackend):
    """As the eager one, in graphs where that is possible: under Triton, where all layers select.

    Args:
        model_runner: whose attention it is.
        chooser: chooses the pages.
        selecting_layers: layers in which it does.
        options: how many pages rows read, as far as requests name no budget of their own.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        chooser: PageChooser,
        selecting_layers: Collection[int],
        options: SparseOptions,
    ) -> None:
        super().__init__(model_runner, chooser, selecting_layers)
        self._options = options
        self._captured: CapturedSteps | None = None
        self._rids: Sequence[str] = ()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        size = self.token_to_kv_pool.page_size
        most = min(MOST_PAGES, -(-request_table(self.req_to_token_pool).shape[1] // size))
        assert self._chooser is not None
        device = self.token_to_kv_pool.slots.keys.device
        chosen = SelectionRule(0, 0, self._options.budget, size).max_pages(most * size)
        all_of_a_short_context = -(-self._options.min_context // size)
        widest = max(chosen, all_of_a_short_context)
        self._captured = CapturedSteps(self._chooser, max_bs, most, widest, size, device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """A graph reads and changes what is known of pages in each of its layers, so none may be freed before
        its end. Upstream's default has the scheduler wait for a graph's beginning only."""
        return SharedReadEnds.max_of((super().shared_read_ends(fm), SharedReadEnds.POST_REPLAY))

    def can_replay(self, forward_batch: ForwardBatch) -> bool:
        """Whether a graph can compute a decode step: its pages are not listed, and each of its requests has a
        selection that the graph holds. Asks only the host."""
        rids, lengths = forward_batch.rids, forward_batch.seq_lens_cpu
        if self._captured is None or not forward_batch.forward_mode.is_decode():
            return False
        if self.on_choice is not None or rids is None or lengths is None:
            return False
        self._rids = rids
        for rid, length in zip(rids, lengths.tolist(), strict=True):
            selection = self._selection(rid)
            if selection is None:
                return False
            (span,) = selection.rule.spans(length - 1, length)
            num_pages = budget = -(-length // self.token_to_kv_pool.page_size)
            if span.selects:
                budget = selection.rule.max_pages(length)
            if not self._captured.holds(num_pages, budget):
                return False
        return True

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Fills what the graph of so many rows reads; before it is captured, makes it."""
        assert self._captured is not None
        pool, locations = self.token_to_kv_pool, forward_batch.out_cache_loc
        if in_capture:
            plan = pool.begin_step(locations, [1] * forward_batch.batch_size)
            assert plan is not None
            self._steps, self._alone = [self._captured.capture(plan)], []
            return
        stops = on_host(forward_batch.seq_lens_cpu, None)[: len(self._rids)]
        plan = pool.begin_step(locations, stops)
        assert plan is not None
        table = self._page_table(forward_batch.req_pool_indices[: len(stops)], stops)
        spans = [
            self._spans_of(request, rid, stop - 1, stop, request, table[request], is_decode=True)[0]
            for request, (rid, stop) in enumerate(zip(self._rids, stops, strict=True))
        ]
        self._ensure([span for span in spans if span.choice is not None])
        num_read = self._captured.fill(forward_batch.batch_size, spans, table, plan)
        self._count_spans(spans, num_read)


def can_run_graph(
    can_run: Callable[..., bool], runner: DecodeCudaGraphRunner, forward_batch: ForwardBatch
) -> bool:
    """Around upstream's of that name: a graph also has to hold the step."""
    backend = runner.attn_backend
    if isinstance(backend, TieredAttentionBackend) and not (
        isinstance(backend, CapturedTieredBackend) and backend.can_replay(forward_batch)
    ):
        return False
    return can_run(runner, forward_batch)
