"""Page scores of prefills beside any attention backend: a Triton pass over the keys after its forward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.cuda_graph_config import Backend, check_cuda_graph_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_importance.observe.trace.records import Detail
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance_kernels.triton.log_sums import LogSums, bytes_per_query
from sgl_importance_kernels.triton.page_reduction import reduce_log_sums
from sgl_importance_kernels.triton.paged_queries import PagedQueries
from sgl_importance_kernels.triton.qk_probe import FLOAT8, probe_layer, refusal, shared_memory, tile_rows
from sglang_importance.attention.layers import attention_layers, full_attention_layers
from sglang_importance.attention.sampling import ObservedQueries
from sglang_importance.attention.source import CURE, opened_source, refuse_unsupported, request_table

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MAX_LOG_SUMS_BYTES = 1 << 29
"""Limit on the log-sums of a pass: 4 layers, 32 heads, 16 requests, 32 queries of 32k tokens, pages of 16."""


class _Step:
    """One observed forward pass: its queries on the device, and the layers that have not run yet."""

    def __init__(self, queries: list[ObservedQueries], batch: PagedQueries, log_sums: LogSums) -> None:
        self.queries = queries
        self.batch = batch
        self.log_sums = log_sums
        self.pending: set[int] = set()


class QkProbe:
    """Observes the last tokens of prefills of the attention backend that it is attached to.

    The backend's forward runs first and with its own arguments, so outputs are stock's. For eager passes
    only: a captured one would replay the probe with the requests of its capture. Decode steps are for a
    ``DecodeEmission`` with the same ``rows`` and ``sampler``.

    Args:
        backend: upstream's, of any class; its methods are wrapped on this instance.

    Raises:
        ValueError: model, KV cache or CUDA graphs do not fit; the message names the cure.
    """

    def __init__(
        self, backend: AttentionBackend, model_runner: ModelRunner, options: ImportanceOptions
    ) -> None:
        _refuse_unsupported(model_runner, options)
        _refuse_captured(model_runner)
        self.options = options
        source = opened_source(model_runner, options)
        self.layers, self.rows, self.sampler = source.layers, source.rows, source.sampler
        self._index = {layer: index for index, layer in enumerate(self.layers)}
        self._pool = model_runner.token_to_kv_pool
        self._table = request_table(model_runner.req_to_token_pool)
        self.num_heads = _query_heads(model_runner.model, self.layers)
        self._gate = torch.ones(1, dtype=torch.int32, device=model_runner.device)
        self._step: _Step | None = None
        after_metadata = self._after_metadata(backend.init_forward_metadata)
        after_forward = self._after_forward(backend.forward_extend)
        backend.init_forward_metadata = after_metadata  # type: ignore[method-assign]  # on this instance only
        backend.forward_extend = after_forward  # type: ignore[method-assign]  # on this instance only

    def _after_metadata(self, upstream: Callable[..., None]) -> Callable[..., None]:
        @wraps(upstream)
        def init_forward_metadata(forward_batch: ForwardBatch, *args: Any, **kwargs: Any) -> None:
            upstream(forward_batch, *args, **kwargs)
            self.rows.attempt(self._open, forward_batch)

        return init_forward_metadata

    def _open(self, forward_batch: ForwardBatch) -> None:
        if self._step is not None:
            logger.warning(
                "KV importance: Page scores of a pass were dropped: layers %s did not run; check "
                "signal.layers of --kv-importance-config",
                sorted(self._step.pending),
            )
        self._step = None
        if forward_batch.forward_mode == ForwardMode.EXTEND:
            with self.rows.time.measured():
                self._step = self._opened(list(self.sampler.observed(forward_batch)))
            self.rows.time.passes += self._step is not None

    def _after_forward(self, upstream: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(upstream)
        def forward(
            q: torch.Tensor, k: Any, v: Any, layer: RadixAttention, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            output = upstream(q, k, v, layer, *args, **kwargs)
            if self._step is not None and layer.layer_id in self._step.pending:
                self.rows.attempt(self._probe, self._step, q, layer)
            return output

        return forward

    def _opened(self, observed: list[ObservedQueries]) -> _Step | None:
        observed = self._fitting(observed)
        if not observed:
            return None
        of_each = len(observed) * self._bytes_per_query(observed[-1])
        max_queries = min(MAX_LOG_SUMS_BYTES // of_each, max(q.num_q for q in observed))
        observed = [_last(queries, max_queries) for queries in observed]
        log_sums = LogSums(
            num_layers=len(self.layers),
            max_requests=len(observed),
            max_queries=max_queries,
            num_heads=self.num_heads,
            max_pages=self._pages(observed[-1]),
            device=self.rows.of_phase(observed[0].phase).body.device,
        )
        step = _Step(observed, self._on_device(observed), log_sums)
        step.pending = set(self.layers)
        return step

    def _fitting(self, observed: list[ObservedQueries]) -> list[ObservedQueries]:
        """The requests of which a query token each fits the limit, the shortest first; alike on all ranks.

        Every row is as wide as the longest request needs it: one long context would take the room of many.
        """
        by_length = sorted(observed, key=lambda queries: queries.seq_len)
        needed = (count * self._bytes_per_query(queries) for count, queries in enumerate(by_length, start=1))
        return by_length[: sum(total <= MAX_LOG_SUMS_BYTES for total in needed)]

    def _bytes_per_query(self, longest: ObservedQueries) -> int:
        return bytes_per_query(len(self.layers), self.num_heads, self._pages(longest))

    def _pages(self, queries: ObservedQueries) -> int:
        return -(-queries.seq_len // self.rows.page_size)

    def _on_device(self, observed: list[ObservedQueries]) -> PagedQueries:
        numbers = [
            [queries.slot * self._table.stride(0) for queries in observed],
            [queries.seq_len for queries in observed],
            [queries.rows.start for queries in observed],
            [queries.num_q for queries in observed],
            [queries.slot for queries in observed],
        ]
        # One transfer; offsets into the request table do not fit 32 bits.
        starts, *others = torch.tensor(numbers, dtype=torch.int64).to(self._gate.device, non_blocking=True)
        seq_lens, first_rows, num_queries, slots = (values.to(torch.int32) for values in others)
        return PagedQueries(
            locations=self._table.view(-1),
            location_starts=starts.contiguous(),
            seq_lens=seq_lens,
            first_query_rows=first_rows,
            num_queries=num_queries,
            slots=slots,
            max_queries=max(queries.num_q for queries in observed),
            max_seq_len=max(queries.seq_len for queries in observed),
        )

    def _probe(self, step: _Step, q: torch.Tensor, layer: RadixAttention) -> None:
        with self.rows.time.measured():
            self._take(step, q, layer)

    def _take(self, step: _Step, q: torch.Tensor, layer: RadixAttention) -> None:
        keys = self._pool.get_key_buffer(layer.layer_id)
        settings: dict[str, Any] = {
            "gate": self._gate,
            "page_size": self.rows.page_size,
            "sink_tokens": self.options.signal.sink_tokens,
            "local_tokens": self.options.signal.local_tokens,
        }
        probe_layer(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            keys,
            step.batch,
            step.log_sums,
            self._index[layer.layer_id],
            scale=layer.scaling * key_scale(layer, keys),
            logit_cap=layer.logit_cap,
            **settings,
        )
        step.pending.remove(layer.layer_id)
        if step.pending:
            return
        self._step = None
        for queries in step.queries:
            self.rows.claim(queries.slot, queries.phase, queries.owner, self._pages(queries), queries.num_q)
        phase = step.queries[0].phase
        reduce_log_sums(step.log_sums, step.batch, self.rows.of_phase(phase), **settings)
        self.rows.written(phase, [queries.slot for queries in step.queries])


def key_scale(layer: RadixAttention, keys: torch.Tensor) -> float:
    """Factor on the stored keys of a layer: that of their quantization, 1 where they are not quantized."""
    return (getattr(layer, "k_scale_float", None) or 1.0) if keys.dtype in FLOAT8 else 1.0


def _last(queries: ObservedQueries, count: int) -> ObservedQueries:
    first = max(queries.rows.start, queries.rows.stop - count)
    return ObservedQueries(
        queries.slot, queries.owner, queries.phase, slice(first, queries.rows.stop), queries.seq_len
    )


def _query_heads(model: torch.nn.Module, layers: Collection[int]) -> int:
    heads = {layer.tp_q_head_num for layer in attention_layers(model, layers)}
    if len(heads) != 1:
        raise ValueError(
            f"qk-probe needs the same number of query heads in every sampled layer, not {sorted(heads)}: "
            "choose layers that agree with signal.layers of --kv-importance-config"
        )
    return int(heads.pop())


def _refuse_unsupported(model_runner: ModelRunner, options: ImportanceOptions) -> None:
    """Raises where the probe's scores would not be those of the backend's attention."""
    refuse_unsupported(model_runner)
    if options.trace.directory and options.trace.detail == Detail.STEPS.value:
        raise ValueError(
            "qk-probe keeps no scores of single steps: use trace.detail 'folds' of --kv-importance-config"
        )
    key_dtype = model_runner.token_to_kv_pool.dtype
    available = full_attention_layers(model_runner.model)
    for layer in attention_layers(model_runner.model, available):
        why = refusal(
            key_dtype=key_dtype,
            # Stored keys never are wider than the queries that the model makes.
            query_dtype=torch.bfloat16 if key_dtype in FLOAT8 else key_dtype,
            head_dim=layer.qk_head_dim,
            value_head_dim=layer.v_head_dim,
            num_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
        )
        if why is not None:
            raise ValueError(f"qk-probe cannot score layer {layer.layer_id}, which has {why}: {CURE}")
        itemsize = 2 if key_dtype in FLOAT8 else key_dtype.itemsize
        page_size, memory = model_runner.page_size or 1, shared_memory(model_runner.device)
        if not tile_rows(1, layer.qk_head_dim, itemsize, page_size, memory):
            raise ValueError(
                f"qk-probe cannot score layer {layer.layer_id}: a tile of its {key_dtype} keys of "
                f"{layer.qk_head_dim} dimensions does not fit the {memory} bytes of shared memory that a "
                f"program has on this GPU: {CURE}"
            )


def _refuse_captured(model_runner: ModelRunner) -> None:
    """Raises where prefills would be replays of a graph."""
    if torch.device(model_runner.device).type != "cuda":
        return
    if not check_cuda_graph_backend("prefill", Backend.DISABLED):
        raise ValueError(
            "the qk-probe observes eager prefills only: start with --cuda-graph-backend-prefill disabled"
        )
