"""sglang's torch-native attention backend, which also leaves page scores behind."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sgl_importance.options import ImportanceOptions
from sgl_importance_kernels.eager import PageScoreAccumulator
from sglang_importance.attention.emission_time import EMISSION_TIME
from sglang_importance.attention.observed import ObservedQueries
from sglang_importance.attention.score_sources import CURE, opened_source, refuse_unsupported
from sglang_importance.recorder import active_recorder

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MAX_KEPT_RATIO = 2
"""A pass's queries are kept as they are where at most this many times what is observed, else copied."""
KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Observed:
    """The query tokens of one request that a forward pass observes.

    Attributes:
        keeps_pass: whether the queries of the whole pass are kept, not a copy of those observed.
        layers: the sampled layers that ran, and what is kept of their queries.
    """

    queries: ObservedQueries
    keeps_pass: bool
    layers: list[tuple[RadixAttention, torch.Tensor]] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    """One emitting forward pass."""

    requests: list[_Observed]
    pending_layers: set[int]


class EmittingTorchNativeBackend(TorchNativeAttnBackend):
    """Upstream's outputs, bit for bit, and page scores of the sampled layers and steps.

    Observed are the last ``window`` tokens of every extend and, per request, its first decode step and every
    ``interval``-th after it. A pass only keeps its queries. Scores are computed when the rows are read, which
    no first token waits for: until then the request holds the keys. A layer's logit soft cap is applied, as
    the model defines it, although this backend of upstream ignores it.

    Raises:
        ValueError: the model, its KV cache or the options do not fit; the message names the cure.
    """

    def __init__(self, model_runner: ModelRunner, options: ImportanceOptions) -> None:
        super().__init__(model_runner)
        _refuse_unsupported(model_runner)
        self.options = options
        source = opened_source(model_runner, options)
        self.layers, self.rows, self._sampler = source.layers, source.rows, source.sampler
        self._step: _Step | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        if self._step is not None:
            logger.warning(
                "Page scores of a pass were dropped: layers %s did not run; check --kv-importance-layers",
                sorted(self._step.pending_layers),
            )
        with EMISSION_TIME.measured():
            pass_tokens = len(forward_batch.input_ids)
            requests = [
                _Observed(queries, keeps_pass=pass_tokens <= MAX_KEPT_RATIO * queries.num_q)
                for queries in self._sampler.observed(forward_batch)
            ]
            self._step = _Step(requests, set(self.layers)) if requests else None
        EMISSION_TIME.passes += bool(requests)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        output = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        self._observe(q, layer)
        return output

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        output = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        self._observe(q, layer)
        return output

    def _observe(self, q: torch.Tensor, layer: RadixAttention) -> None:
        step = self._step
        if step is None or layer.layer_id not in step.pending_layers:
            return
        step.pending_layers.remove(layer.layer_id)
        for request in step.requests:
            kept = q if request.keeps_pass else _copied(q, layer, request.queries)
            request.layers.append((layer, kept))
        if not step.pending_layers:
            self._commit(step)
            self._step = None

    def _commit(self, step: _Step) -> None:
        recorder = active_recorder()
        for request in step.requests:
            queries = request.queries
            row = (queries.slot, queries.phase, queries.owner)
            if recorder is not None and recorder.wants_steps:
                sums = self._scores(request)
                self.rows.add(*row, sums, queries.num_q)
                recorder.step(queries.owner, queries.phase, queries.seq_len, sums, queries.num_q)
            else:
                self.rows.add_later(*row, partial(self._scores, request), queries.num_q)

    @torch.inference_mode()
    def _scores(self, request: _Observed) -> torch.Tensor:
        """Sums over the observed queries, as ``ScoreRows`` takes them; the request still has its slot."""
        queries = request.queries
        with EMISSION_TIME.measured():
            scores = PageScoreAccumulator(
                seq_len=queries.seq_len,
                num_q=queries.num_q,
                page_size=self.rows.page_size,
                sink_tokens=self.options.sink_tokens,
                local_tokens=self.options.local_tokens,
                device=self.device,
            )
            # Padded with location 0, upstream's own padding token; the scores mask it.
            table = self.req_to_token_pool.req_to_token
            locations = table.new_zeros(scores.padded_len)
            locations[: queries.seq_len] = table[queries.slot, : queries.seq_len]
            for layer, kept in request.layers:
                q = _by_head(kept, layer)
                observed = q[queries.rows] if request.keeps_pass else q
                keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
                scores.add_layer(observed, keys, locations, scale=layer.scaling, logit_cap=layer.logit_cap)
            return scores.sums()


def _by_head(q: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
    return q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)


def _copied(q: torch.Tensor, layer: RadixAttention, observed: ObservedQueries) -> torch.Tensor:
    with EMISSION_TIME.measured():
        return _by_head(q, layer)[observed.rows].clone()


def _refuse_unsupported(model_runner: ModelRunner) -> None:
    """Raises where the keys in the pool are not what the model's queries are multiplied with."""
    refuse_unsupported(model_runner)
    dtype = model_runner.token_to_kv_pool.dtype
    if dtype not in KEY_DTYPES:
        raise ValueError(
            f"page scores need keys in float32, bfloat16 or float16, not {dtype}: "
            "use --kv-cache-dtype auto, or " + CURE
        )
