"""sglang's torch-native attention backend, which also leaves page scores behind."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance_kernels.eager import PageScoreAccumulator
from sglang_importance.attention.sampling import ObservedQueries
from sglang_importance.attention.source import CURE, opened_source, refuse_unsupported, request_table

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class _Pass:
    """One forward pass that observes requests.

    Attributes:
        observed: the query tokens that it observes.
        rows: their rows in the batch's query tensor, one request after the other; int64 [tokens].
        missing_layers: the sampled layers that have not run.
        queries: of the sampled layers that ran: those rows, [tokens, heads, head dimension], and the learnt
            sinks of the heads, [heads], where the layer has some.
    """

    observed: list[ObservedQueries]
    rows: torch.Tensor
    missing_layers: set[int]
    queries: list[tuple[RadixAttention, torch.Tensor, torch.Tensor | None]] = field(default_factory=list)


class EmittingTorchNativeBackend(TorchNativeAttnBackend):
    """Upstream's outputs, bit for bit, and page scores of the sampled layers and steps.

    Observed are the last ``window`` tokens of every extend and, per request, its first decode step and every
    ``interval``-th after it. A pass only keeps the observed queries. Scores are computed when the rows are
    read, which no first token waits for: until then the request holds its keys. A layer's logit soft cap is
    applied, as the model defines it, although this backend of upstream ignores it.

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

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self.rows.attempt(self._open, forward_batch)

    def _open(self, forward_batch: ForwardBatch) -> None:
        """A forward pass begins."""
        if self._pass is not None:
            logger.warning(
                "KV importance: Page scores of a pass were dropped: layers %s did not run; check "
                "signal.layers of --kv-importance-config",
                sorted(self._pass.missing_layers),
            )
        self._pass = None
        with self.rows.time.measured():
            observed = self._observed(forward_batch)
            if not observed:
                return
            rows = np.concatenate([np.arange(each.rows.start, each.rows.stop) for each in observed])
            self._pass = _Pass(observed, torch.from_numpy(rows).to(self.device), set(self.layers))
        self.rows.time.passes += 1

    def _observed(self, forward_batch: ForwardBatch) -> list[ObservedQueries]:
        """The query tokens of a pass that begins which are observed."""
        return list(self._sampler.observed(forward_batch))

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
        output: torch.Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        self.rows.attempt(self._observe, q, layer, kwargs.get("sinks"))
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
        output: torch.Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        self.rows.attempt(self._observe, q, layer, kwargs.get("sinks"))
        return output

    def _observe(self, q: torch.Tensor, layer: RadixAttention, sinks: torch.Tensor | None) -> None:
        running = self._pass
        if running is None or layer.layer_id not in running.missing_layers:
            return
        running.missing_layers.remove(layer.layer_id)
        with self.rows.time.measured():
            by_head = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
            running.queries.append((layer, by_head[running.rows], sinks))
        if not running.missing_layers:
            self._pass = None
            self._commit(running)

    def _commit(self, done: _Pass) -> None:
        on_step = self.rows.on_step
        start = 0
        for observed in done.observed:
            stop = start + observed.num_q
            compute = partial(self._scores, observed, done.queries, slice(start, stop))
            row = (observed.slot, observed.phase, observed.owner)
            if on_step is not None:
                sums = compute()
                self.rows.add(*row, sums, observed.num_q)
                on_step(observed.owner, observed.phase, observed.seq_len, sums, observed.num_q)
            else:
                self.rows.add_later(*row, compute, observed.num_q)
            start = stop

    @torch.inference_mode()
    def _scores(
        self,
        observed: ObservedQueries,
        queries: list[tuple[RadixAttention, torch.Tensor, torch.Tensor | None]],
        rows: slice,
    ) -> torch.Tensor:
        """Sums over the observed queries of a request, as ``ScoreRows`` takes them; it still has its slot.

        Args:
            queries: kept of the pass, by layer.
            rows: which of them are the request's.
        """
        with self.rows.time.measured():
            scores = PageScoreAccumulator(
                seq_len=observed.seq_len,
                num_q=observed.num_q,
                page_size=self.rows.page_size,
                sink_tokens=self.options.signal.sink_tokens,
                local_tokens=self.options.signal.local_tokens,
            )
            # Padded with location 0, upstream's own padding token; the scores mask it.
            table = request_table(self.req_to_token_pool)
            locations = table.new_zeros(scores.padded_len)
            locations[: observed.seq_len] = table[observed.slot, : observed.seq_len]
            for layer, kept, sinks in queries:
                scores.add_layer(
                    kept[rows],
                    self.token_to_kv_pool.get_key_buffer(layer.layer_id),
                    locations,
                    scale=layer.scaling,
                    logit_cap=layer.logit_cap,
                    sinks=sinks,
                )
            sums: torch.Tensor = scores.sums()
            return sums


def _refuse_unsupported(model_runner: ModelRunner) -> None:
    """Raises where the model's queries are not multiplied with the keys in the pool."""
    refuse_unsupported(model_runner)
    dtype = model_runner.token_to_kv_pool.dtype
    if dtype not in KEY_DTYPES:
        raise ValueError(
            f"page scores need keys in float32, bfloat16 or float16, not {dtype}: "
            "use --kv-cache-dtype auto, or " + CURE
        )
