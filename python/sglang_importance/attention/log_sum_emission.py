"""Decode attention that leaves log-sums per page behind, and their reduction."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance_kernels.triton.log_sums import LogSums, bytes_per_query
from sgl_importance_kernels.triton.page_reduction import reduce_log_sums
from sgl_importance_kernels.triton.paged_queries import PagedQueries
from sglang_importance.attention.decode_emission import MAX_EMITTED_BYTES, DecodeEmission
from sglang_importance.attention.prefill_probe import QkProbe
from sglang_importance.attention.rows import Phase
from sglang_importance.attention.sampling import ObservedQueries

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class LogSumEmission(DecodeEmission):
    """Static log-sums of one decode step.

    Args:
        probe: observes the prefills; its rows, sampler and layers are shared.
        max_batch: requests of a batch, padding included.

    Attributes:
        max_observed: requests that a step observes at most, fewer than are due where their log-sums need more
            than ``MAX_EMITTED_BYTES``.
    """

    log_sums: LogSums

    def __init__(
        self,
        probe: QkProbe,
        model_runner: ModelRunner,
        options: ImportanceOptions,
        *,
        max_batch: int,
    ) -> None:
        super().__init__(
            model_runner,
            probe.rows,
            probe.sampler,
            layers=probe.layers,
            max_batch=max_batch,
            interval=options.signal.interval,
        )
        self.settings = {
            "page_size": self.rows.page_size,
            "sink_tokens": options.signal.sink_tokens,
            "local_tokens": options.signal.local_tokens,
        }
        fitting = MAX_EMITTED_BYTES // bytes_per_query(len(self.layers), probe.num_heads, self.rows.max_pages)
        self.max_observed: int = max(1, min(self.observable(max_batch), fitting))
        self.log_sums = self._allocated(probe.num_heads, model_runner.device)
        logger.info(
            "KV importance: Log-sums of decode steps: %d requests at once, %.1f MiB",
            self.max_observed,
            self.log_sums.num_bytes / 2**20,
        )
        self._no_starts = torch.zeros(self.max_observed, dtype=torch.int64, device=model_runner.device)
        self._open_gate = torch.ones(1, dtype=torch.int32, device=model_runner.device)
        # Compiles the reduction: no step waits for a compiler.
        self._launch(1, 1, torch.zeros_like(self._open_gate))

    @abstractmethod
    def _allocated(self, num_heads: int, device: torch.device | str) -> LogSums:
        """Room for ``max_observed`` requests."""

    def admitted(self, observed: Sequence[ObservedQueries], batch_size: int) -> int:
        return min(len(observed), self.max_observed)

    def reduce(self, observed: Sequence[ObservedQueries]) -> None:
        self._launch(len(observed), max(queries.seq_len for queries in observed), self._open_gate)

    def batch(self, count: int, max_seq_len: int) -> PagedQueries:
        """The first ``count`` observed requests, without the places of their keys."""
        slots = self.numbers.slots[:count]
        return PagedQueries(
            locations=slots,
            location_starts=self._no_starts[:count],
            seq_lens=self.numbers.seq_lens[:count],
            first_query_rows=self.numbers.batch_rows[:count],
            num_queries=self.numbers.num_queries[:count],
            slots=slots,
            max_queries=1,
            max_seq_len=max_seq_len,
        )

    def _launch(self, count: int, max_seq_len: int, gate: torch.Tensor) -> None:
        rows = self.rows.of_phase(Phase.DECODE)
        reduce_log_sums(self.log_sums, self.batch(count, max_seq_len), rows, gate=gate, **self.settings)
