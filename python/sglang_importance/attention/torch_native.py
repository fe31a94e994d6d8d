"""sglang's torch-native attention backend, which also leaves page scores behind."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sgl_importance.options import ImportanceOptions
from sgl_importance_kernels.eager import PageScoreAccumulator
from sglang_importance.attention.sampling import ObservedQueries, PassRequests
from sglang_importance.attention.source import CURE, opened_source, refuse_unsupported
from sglang_importance.metrics.emission_time import EMISSION_TIME

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MAX_KEPT_RATIO = 2
"""A pass's queries are kept as they are where at most this many times what is observed, else copied."""
MAX_UNSAMPLED_TOKENS = 64
"""Query tokens of a pass up to which all are kept until somebody asks which of them are observed."""
MAX_UNSAMPLED_PASSES = 2
"""Such passes at a time: a prefill, and the decode step that overlaps its answer."""
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
class _Pass:
    """One forward pass.

    Attributes:
        batch: who is in it; by value where nobody has asked by the end of the pass.
        num_tokens: query tokens of all requests.
        missing_layers: the sampled layers that have not run.
        requests: what it observes; None while nobody has asked.
        layers: the sampled layers that ran, and the queries of the whole pass, where nobody has asked.
    """

    batch: ForwardBatch | PassRequests
    num_tokens: int
    missing_layers: set[int]
    requests: list[_Observed] | None = None
    layers: list[tuple[RadixAttention, torch.Tensor]] = field(default_factory=list)


class EmittingTorchNativeBackend(TorchNativeAttnBackend):
    """Upstream's outputs, bit for bit, and page scores of the sampled layers and steps.

    Observed are the last ``window`` tokens of every extend and, per request, its first decode step and every
    ``interval``-th after it. A pass only keeps its queries, and a small one does not even ask whom it
    observes. Both are made up for when the rows are read, which no first token waits for: until then the
    request holds the keys. A layer's logit soft cap is applied, as the model defines it, although this
    backend of upstream ignores it.

    Raises:
        ValueError: the model, its KV cache or the options do not fit; the message names the cure.
    """

    def __init__(self, model_runner: ModelRunner, options: ImportanceOptions) -> None:
        super().__init__(model_runner)
        _refuse_unsupported(model_runner)
        self.options = options
        source = opened_source(model_runner, options)
        self.layers, self.rows, self._sampler = source.layers, source.rows, source.sampler
        self._pass: _Pass | None = None
        self._unsampled: deque[_Pass] = deque()
        self.rows.before_access = self._sample_all

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self.rows.attempt(self._open, forward_batch)

    def _open(self, forward_batch: ForwardBatch) -> None:
        """A forward pass begins."""
        if self._pass is not None and self._pass.requests is not None:
            _warn_of_dropped(self._pass)
        self._pass = None  # one that waits to be sampled is warned of then
        if forward_batch.rids is None:  # upstream's own dummy batch
            return
        if len(self._unsampled) == MAX_UNSAMPLED_PASSES:
            self._sample(self._unsampled.popleft())
        num_tokens = len(forward_batch.input_ids)
        if self._can_wait(forward_batch):
            self._pass = _Pass(PassRequests.copied(forward_batch), num_tokens, set(self.layers))
            self._unsampled.append(self._pass)
        else:
            self._pass = _Pass(forward_batch, num_tokens, set(self.layers))
            self._sample_all()
            self._pass.requests = self._observed_by(self._pass)
            if not self._pass.requests:
                self._pass = None

    def _can_wait(self, batch: ForwardBatch) -> bool:
        """Whether it is asked later whom a pass observes: where writing down who is in it waits for no
        device."""
        is_small = len(batch.input_ids) <= MAX_UNSAMPLED_TOKENS
        return is_small and batch.req_pool_indices.device.type == "cpu" and self.rows.on_step is None

    def _sample_all(self) -> None:
        """Asks of every pass so far whom it observed, in the order in which they ran."""
        while self._unsampled:
            self._sample(self._unsampled.popleft())

    def _sample(self, done: _Pass) -> None:
        done.requests = self._observed_by(done)
        if not done.requests:
            return
        if done.missing_layers:
            _warn_of_dropped(done)
            return
        for layer, q in done.layers:
            self._keep(q, layer, done.requests)
        self._commit(done.requests)

    def _observed_by(self, step: _Pass) -> list[_Observed]:
        with EMISSION_TIME.measured():
            requests = [
                _Observed(queries, keeps_pass=step.num_tokens <= MAX_KEPT_RATIO * queries.num_q)
                for queries in self._sampler.observed(step.batch)
            ]
        EMISSION_TIME.passes += bool(requests)
        return requests

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
        self.rows.attempt(self._observe, q, layer)
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
        self.rows.attempt(self._observe, q, layer)
        return output

    def _observe(self, q: torch.Tensor, layer: RadixAttention) -> None:
        step = self._pass
        if step is None or layer.layer_id not in step.missing_layers:
            return
        step.missing_layers.remove(layer.layer_id)
        if not step.missing_layers:
            self._pass = None  # an idle server holds no queries of its last pass
        if step.requests is None:
            step.layers.append((layer, q))
            return
        self._keep(q, layer, step.requests)
        if not step.missing_layers:
            self._commit(step.requests)

    @staticmethod
    def _keep(q: torch.Tensor, layer: RadixAttention, requests: list[_Observed]) -> None:
        for request in requests:
            kept = q if request.keeps_pass else _copied(q, layer, request.queries)
            request.layers.append((layer, kept))

    def _commit(self, requests: list[_Observed]) -> None:
        on_step = self.rows.on_step
        for request in requests:
            queries = request.queries
            row = (queries.slot, queries.phase, queries.owner)
            if on_step is not None:
                sums = self._scores(request)
                self.rows.add(*row, sums, queries.num_q)
                on_step(queries.owner, queries.phase, queries.seq_len, sums, queries.num_q)
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


def _warn_of_dropped(step: _Pass) -> None:
    if step.requests and step.missing_layers:
        logger.warning(
            "Page scores of a pass were dropped: layers %s did not run; check --kv-importance-layers",
            sorted(step.missing_layers),
        )


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
