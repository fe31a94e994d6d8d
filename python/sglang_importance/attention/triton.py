"""sglang's Triton attention backend, whose decode kernels also leave page scores behind."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from sgl_importance.options import ImportanceOptions
from sgl_importance_kernels.triton.log_sums import DecodeLogSums
from sgl_importance_kernels.triton.page_reduction import reduce_log_sums
from sgl_importance_kernels.triton.paged_queries import PagedQueries
from sgl_importance_kernels.triton.score_mod import SCORE_MODS
from sglang_importance.attention.decode_emission import MAX_EMITTED_BYTES, DecodeEmission
from sglang_importance.attention.observed import ObservedQueries
from sglang_importance.attention.qk_probe import QkProbe
from sglang_importance.attention.rows import Phase

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class TritonEmission(DecodeEmission):
    """Log-sums that the decode kernels leave behind through our ``score_mod``, and their reduction.

    Raises:
        ValueError: the page size has no ``score_mod``.
    """

    def __init__(
        self, probe: QkProbe, model_runner: ModelRunner, options: ImportanceOptions, *, max_batch: int
    ) -> None:
        if torch.version.hip is not None:
            raise ValueError(
                "page scores from Triton's decode kernels need tiles of 32 tokens, smaller on AMD GPUs: "
                "use --kv-importance-source qk_probe"
            )
        page_size = probe.rows.page_size
        if page_size not in SCORE_MODS:
            raise ValueError(
                f"page scores from Triton's decode kernels need a page size of "
                f"{', '.join(map(str, SCORE_MODS))}, not {page_size}: use --page-size 16, or "
                "--kv-importance-source qk_probe"
            )
        super().__init__(model_runner, probe.rows, probe.sampler, layers=probe.layers, max_batch=max_batch)
        self.score_mod = SCORE_MODS[page_size]
        self._settings = {
            "page_size": page_size,
            "sink_tokens": options.sink_tokens,
            "local_tokens": options.local_tokens,
        }
        bytes_per_request = 4 * len(self.layers) * probe.num_heads * (self.rows.max_pages + 4)
        self._max_observed = max(1, min(max_batch, MAX_EMITTED_BYTES // bytes_per_request))
        self.log_sums = DecodeLogSums(
            num_layers=len(self.layers),
            max_observed=self._max_observed,
            max_batch=max_batch,
            num_heads=probe.num_heads,
            max_pages=self.rows.max_pages,
            sink_tokens=options.sink_tokens,
            local_tokens=options.local_tokens,
            device=model_runner.device,
        )
        logger.info(
            "Log-sums of decode steps: %d requests at once, %.1f MiB",
            self._max_observed,
            self.log_sums.num_bytes / 2**20,
        )
        int32 = {"dtype": torch.int32, "device": model_runner.device}
        self._ones = torch.ones(self._max_observed, **int32)
        self._no_starts = torch.zeros(self._max_observed, dtype=torch.int64, device=model_runner.device)
        self._warm_up()

    def admitted(self, observed: Sequence[ObservedQueries]) -> int:
        return min(len(observed), self._max_observed)

    def opened(self) -> None:
        self.log_sums.observe(self.order)

    def reduce(self, observed: Sequence[ObservedQueries]) -> None:
        max_seq_len = max(queries.seq_len for queries in observed)
        self._launch(len(observed), max_seq_len, self._ones[:1])

    def _launch(self, count: int, max_seq_len: int, gate: torch.Tensor) -> None:
        ones = self._ones[:count]
        batch = PagedQueries(
            locations=self._ones,  # The keys are not looked at again.
            location_starts=self._no_starts[:count],
            seq_lens=self.seq_lens(count),
            first_query_rows=ones,
            num_queries=ones,
            slots=self.slots(count),
            max_queries=1,
            max_seq_len=max_seq_len,
        )
        reduce_log_sums(self.log_sums, batch, self.rows.stacked(Phase.DECODE), gate=gate, **self._settings)

    def _warm_up(self) -> None:
        """Compiles the reduction: no step waits for a compiler."""
        self._launch(1, 1, torch.zeros_like(self._ones[:1]))


class EmittingTritonBackend(TritonAttnBackend):
    """Upstream's outputs, bit for bit, and page scores of the sampled layers and steps.

    Decode steps are observed by upstream's own kernels through their ``score_mod``, captured in a CUDA graph
    or not; the last tokens of a prefill by the qk-probe.

    Raises:
        ValueError: model, KV cache, page size or CUDA graphs do not fit; the message names the cure.
    """

    # The host must know every sequence's length to name the pages of a step.
    needs_cpu_seq_lens = True

    def __init__(self, model_runner: ModelRunner, options: ImportanceOptions) -> None:
        super().__init__(model_runner)
        probe = QkProbe(self, model_runner, options, decode=False)
        self.rows = probe.rows
        max_batch = model_runner.req_to_token_pool.req_to_token.shape[0]
        self.emission = TritonEmission(probe, model_runner, options, max_batch=max_batch)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        score_mod: Any = None,
        aux_tensors: Any = None,
    ) -> torch.Tensor:
        index = self.emission.index_of(layer.layer_id)
        if index is not None:
            if score_mod is not None:
                raise ValueError(
                    f"layer {layer.layer_id} changes its logits with a score_mod of its own, which leaves no "
                    "room for ours: name other layers with --kv-importance-layers"
                )
            assert forward_batch.batch_size <= self.emission.max_batch, forward_batch.batch_size
            score_mod = self.emission.score_mod
            aux_tensors = (self.emission.log_sums.aux(index),)
        return super().forward_decode(
            q, k, v, layer, forward_batch, save_kv_cache, sinks, score_mod, aux_tensors
        )
