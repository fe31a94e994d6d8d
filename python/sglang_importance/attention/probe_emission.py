"""Decode steps observed by the qk-probe behind any backend's attention, captured in a CUDA graph or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance_kernels.triton.log_sums import LogSums
from sgl_importance_kernels.triton.qk_probe import probe_layer
from sglang_importance.attention.log_sum_emission import LogSumEmission
from sglang_importance.attention.prefill_probe import QkProbe, key_scale
from sglang_importance.attention.sampling import ObservedQueries
from sglang_importance.attention.source import request_table

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner


class ProbeEmission(LogSumEmission):
    """Probes the sampled layers in every decode step, for the requests that the device's numbers name.

    The backend's forward runs first and with its own arguments, so outputs are stock's; the probe is launched
    behind it on the same stream, into the same graph where there is one.

    Args:
        probe: attached to the same backend; observes the prefills.
        backend: upstream's, of any class; ``forward_decode`` is wrapped on this instance.
    """

    def __init__(
        self,
        probe: QkProbe,
        backend: AttentionBackend,
        model_runner: ModelRunner,
        options: ImportanceOptions,
    ) -> None:
        table = request_table(model_runner.req_to_token_pool)
        super().__init__(probe, model_runner, options, max_batch=table.shape[0])
        self._pool = model_runner.token_to_kv_pool
        self._table = table
        self._location_starts = torch.zeros_like(self._no_starts)
        wrapped = self._behind(backend.forward_decode)
        backend.forward_decode = wrapped  # type: ignore[method-assign]  # on this instance only
        own_reads_end = backend.shared_read_ends

        def shared_read_ends(fm: ForwardMode) -> SharedReadEnds:
            # A captured probe reads the request table in each of its layers.
            return SharedReadEnds.max_of((own_reads_end(fm), SharedReadEnds.POST_REPLAY))

        backend.shared_read_ends = shared_read_ends  # type: ignore[method-assign]

    def _allocated(self, num_heads: int, device: torch.device | str) -> LogSums:
        return LogSums(
            num_layers=len(self.layers),
            max_requests=self.max_observed,
            max_queries=1,
            num_heads=num_heads,
            max_pages=self.rows.max_pages,
            device=device,
        )

    def admitted(self, observed: Sequence[ObservedQueries], batch_size: int) -> int:
        return min(len(observed), self._launched(batch_size))

    def _launched(self, batch_size: int) -> int:
        """Requests that a launch has programs for. Those of a captured one return at once in other steps, so
        it has no more of them than a batch of its size can need: its keys are split into more parts then."""
        return min(self.max_observed, self.observable(batch_size))

    def opened(self) -> None:
        # Offsets into the request table do not fit 32 bits.
        self._location_starts.copy_(self.numbers.slots[: self.max_observed]).mul_(self._table.stride(0))

    def _behind(self, upstream: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(upstream)
        def forward_decode(
            q: torch.Tensor, k: Any, v: Any, layer: RadixAttention, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            output = upstream(q, k, v, layer, *args, **kwargs)
            index = self.index_of(layer.layer_id)
            if index is not None and not self.observes_nobody:
                self._probe(q, layer, index)
            return output

        return forward_decode

    def _probe(self, q: torch.Tensor, layer: RadixAttention, index: int) -> None:
        keys = self._pool.get_key_buffer(layer.layer_id)
        count = self._launched(q.shape[0])
        queries = replace(
            self.batch(count, self.rows.max_pages * self.rows.page_size),
            locations=self._table.view(-1),
            location_starts=self._location_starts[:count],
        )
        probe_layer(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            keys,
            queries,
            self.log_sums,
            index,
            gate=self._open_gate,
            scale=layer.scaling * key_scale(layer, keys),
            logit_cap=layer.logit_cap,
            **self.settings,
        )
