"""sglang's Triton attention backend, whose decode kernels also leave page scores behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance_kernels.triton.log_sums import DecodeLogSums
from sgl_importance_kernels.triton.score_mod import SCORE_MODS
from sglang_importance.attention.log_sum_emission import LogSumEmission
from sglang_importance.attention.prefill_probe import QkProbe
from sglang_importance.attention.source import request_table

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class TritonEmission(LogSumEmission):
    """Log-sums that upstream's decode kernels leave behind through our ``score_mod``.

    Raises:
        ValueError: the page size has no ``score_mod``.
    """

    log_sums: DecodeLogSums

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
        self.score_mod = SCORE_MODS[page_size]
        self._body = {"sink_tokens": options.signal.sink_tokens, "local_tokens": options.signal.local_tokens}
        super().__init__(probe, model_runner, options, max_batch=max_batch)

    def _allocated(self, num_heads: int, device: torch.device | str) -> DecodeLogSums:
        return DecodeLogSums(
            num_layers=len(self.layers),
            max_observed=self.max_observed,
            max_batch=self.max_batch,
            num_heads=num_heads,
            max_pages=self.rows.max_pages,
            device=device,
            **self._body,
        )

    def opened(self) -> None:
        self.log_sums.observe(self.numbers.order)


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
        probe = QkProbe(self, model_runner, options)
        self.rows = probe.rows
        max_batch = request_table(model_runner.req_to_token_pool).shape[0]
        self.emission = TritonEmission(probe, model_runner, options, max_batch=max_batch)

    def forward_decode(  # type: ignore[override]  # the parameters of upstream's Triton backend
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
                    "room for ours: name other layers with signal.layers of --kv-importance-config"
                )
            assert forward_batch.batch_size <= self.emission.max_batch, forward_batch.batch_size
            score_mod = self.emission.score_mod
            aux_tensors = (self.emission.log_sums.aux(index),)
        output: torch.Tensor = super().forward_decode(
            q, k, v, layer, forward_batch, save_kv_cache, sinks, score_mod, aux_tensors
        )
        return output
