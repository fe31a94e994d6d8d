"""sglang's FlashInfer attention backend, whose decode kernels also leave logits behind."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper
from sglang.srt.layers.attention.flashinfer_backend import DecodeMetadata, FlashInferAttnBackend

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance_kernels.flashinfer import EmittingDecode
from sgl_importance_kernels.triton.logit_reduction import DecodeLogits, ObservedLogits, reduce_logits
from sglang_importance.attention.decode_emission import MAX_EMITTED_BYTES, DecodeEmission
from sglang_importance.attention.layers import attention_layers
from sglang_importance.attention.prefill_probe import QkProbe
from sglang_importance.attention.rows import Phase
from sglang_importance.attention.sampling import ObservedQueries
from sglang_importance.attention.source import request_table

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MASS_TOLERANCE = 2e-2
"""Bound on the error that half-precision logits of 40 leave in the mass of a query token."""
CURE = "use --kv-importance-source qk_probe"


class FlashInferEmission(DecodeEmission):
    """Logits and log-sums that the decode kernels leave behind, and their reduction.

    Raises:
        ValueError: the longest sequence does not fit the buffers.
    """

    def __init__(
        self,
        probe: QkProbe,
        model_runner: ModelRunner,
        options: ImportanceOptions,
        *,
        num_kv_heads: int,
        max_batch: int,
        logit_dtype: torch.dtype,
    ) -> None:
        super().__init__(
            model_runner,
            probe.rows,
            probe.sampler,
            layers=probe.layers,
            max_batch=max_batch,
            interval=options.signal.interval,
        )
        self.rows.mass_tolerance = MASS_TOLERANCE
        self._settings = {
            "page_size": self.rows.page_size,
            "sink_tokens": options.signal.sink_tokens,
            "local_tokens": options.signal.local_tokens,
        }
        longest = request_table(model_runner.req_to_token_pool).shape[1]
        bytes_per_token = logit_dtype.itemsize * len(self.layers) * probe.num_heads
        self.max_tokens = min(MAX_EMITTED_BYTES // bytes_per_token, max_batch * longest)
        if self.max_tokens < longest:
            raise ValueError(
                f"logits of {longest} tokens in {len(self.layers)} layers take more than "
                f"{MAX_EMITTED_BYTES >> 20} MiB: lower --context-length, name fewer layers "
                f"under signal.layers of --kv-importance-config, or {CURE}"
            )
        self.step = DecodeLogits(
            num_layers=len(self.layers),
            num_kv_heads=num_kv_heads,
            group=probe.num_heads // num_kv_heads,
            max_tokens=self.max_tokens,
            max_requests=max_batch,
            max_observed=self.observable(max_batch),
            max_pages=self.rows.max_pages,
            dtype=logit_dtype,
            device=model_runner.device,
        )
        mebibytes = self.step.num_bytes / 2**20
        logger.info(
            "KV importance: Logits of decode steps: %d tokens at once, %.1f MiB", self.max_tokens, mebibytes
        )
        int32 = {"dtype": torch.int32, "device": model_runner.device}
        self._no_starts = torch.full((max_batch,), -1, **int32)
        self._open_gate = torch.ones(1, **int32)
        self._launch(1, 1, torch.zeros(1, **int32))  # Compiles the reduction: no step waits for a compiler.

    def admitted(self, observed: Sequence[ObservedQueries], batch_size: int) -> int:
        observable = observed[: self.observable(batch_size)]
        ends = accumulate(queries.seq_len for queries in observable)
        return sum(end <= self.max_tokens for end in ends)

    def opened(self) -> None:
        """The kernels read the staged numbers themselves."""

    def reduce(self, observed: Sequence[ObservedQueries]) -> None:
        self._launch(len(observed), max(queries.seq_len for queries in observed), self._open_gate)

    def arguments(self, index: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and starts that the kernels of a layer are handed: of no request where it is not sampled."""
        return self.step.logits[index or 0], self._no_starts if index is None else self.numbers.batch_starts

    def log_sums(self, index: int, batch: int) -> torch.Tensor:
        log_sums: torch.Tensor = self.step.log_sums
        return log_sums[index, :batch]

    def _launch(self, count: int, max_seq_len: int, gate: torch.Tensor) -> None:
        observed = ObservedLogits(
            starts=self.numbers.starts[:count],
            seq_lens=self.numbers.seq_lens[:count],
            batch_rows=self.numbers.batch_rows[:count],
            slots=self.numbers.slots[:count],
        )
        reduce_logits(
            self.step,
            observed,
            self.rows.of_phase(Phase.DECODE),
            gate=gate,
            max_seq_len=max_seq_len,
            log_sums_in_base_2=True,
            **self._settings,
        )


class EmittingDecodeWrapper(BatchDecodeWithPagedKVCacheWrapper):  # type: ignore[misc]  # of no type here
    """FlashInfer's decode wrapper over our attention variant, called as upstream's backend calls stock's.

    Args:
        form: of the kernels, which are built and loaded here where ``built`` is None.
        built: another wrapper of the same form, whose kernels this one launches. FlashInfer would look for
            them on the disk, and register them with torch, once for every batch size that is captured.

    Attributes:
        layer: index of the layer that runs next among the sampled ones; None where not sampled.
    """

    def __init__(
        self,
        *args: Any,
        form: EmittingDecode,
        emission: FlashInferEmission,
        built: EmittingDecodeWrapper | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, jit_args=form.jit_args() if built is None else None, **kwargs)
        if built is not None:
            self._jit_module: Any = built._jit_module
            self._jit_additional_tensor_names: list[str] = built._jit_additional_tensor_names
        self._emission = emission
        self.layer: int | None = None

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        *,
        sm_scale: float,
        logits_soft_cap: float = 0.0,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> torch.Tensor:
        """Attention of one layer; the scale of the keys goes into the softmax scale, as in stock."""
        assert not logits_soft_cap, logits_soft_cap
        logits, starts = self._emission.arguments(self.layer)
        sampled = {} if self.layer is None else {"lse": self._emission.log_sums(self.layer, q.shape[0])}
        output: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = self.run(
            q,
            paged_kv_cache,
            logits,
            starts,
            sm_scale if k_scale is None else sm_scale * k_scale,
            0.0,
            logits.stride(0),
            v_scale=v_scale,
            return_lse=bool(sampled),
            **sampled,
        )
        return output[0] if isinstance(output, tuple) else output


class EmittingFlashInferBackend(FlashInferAttnBackend):
    """Upstream's outputs and page scores of the sampled layers and steps.

    Every layer decodes through our variant of FlashInfer's kernels, so one plan serves all, eager or captured
    in a CUDA graph; layers that are not sampled are handed starts that observe no request. The last tokens
    of a prefill are observed by the qk-probe.

    Raises:
        ValueError: model, KV cache, kernels or CUDA graphs do not fit; the message names the cure.
    """

    def __init__(self, model_runner: ModelRunner, options: ImportanceOptions) -> None:
        super().__init__(model_runner, init_new_workspace=model_runner.init_new_workspace)
        self._refuse_unsupported(model_runner)
        probe = QkProbe(self, model_runner, options)
        self.rows = probe.rows
        (num_kv_heads,) = {
            layer.tp_k_head_num for layer in attention_layers(model_runner.model, probe.layers)
        }
        head_dim = model_runner.model_config.head_dim
        assert head_dim is not None
        self._form = EmittingDecode(
            head_dim=head_dim,
            dtype=model_runner.dtype,
            kv_dtype=self.flashinfer_kv_cache_dtype,
            tensor_cores=self.decode_use_tensor_cores,
        )
        self.emission = FlashInferEmission(
            probe,
            model_runner,
            options,
            num_kv_heads=num_kv_heads,
            max_batch=request_table(model_runner.req_to_token_pool).shape[0],
            logit_dtype=self._form.logit_dtype,
        )
        self._built: EmittingDecodeWrapper | None = None
        self._built = self._wrapper()
        self.decode_wrappers = [self._built]

    def _refuse_unsupported(self, model_runner: ModelRunner) -> None:
        # Upstream leaves these checks out for subclasses.
        self._check_kv_attention_access("prefill", self.prefill_kv_access)
        self._check_kv_attention_access("decode", self.decode_kv_access)
        layers = attention_layers(model_runner.model)
        unsupported = {
            "sliding-window or cross attention": self.num_wrappers != 1,
            "a KV cache that is dequantized for attention": self.decode_uses_dequant_workspace,
            # sglang plans stock's decode without the cap: there is no stock output to be equal to.
            "a logit soft cap": any(layer.logit_cap > 0 for layer in layers),
            "layers with different numbers of KV heads": len({layer.tp_k_head_num for layer in layers}) > 1,
        }
        for what, found in unsupported.items():
            if found:
                raise ValueError(f"page scores from FlashInfer's decode do not support {what}: {CURE}")

    def _wrapper(self, **buffers: Any) -> EmittingDecodeWrapper:
        return EmittingDecodeWrapper(
            self.workspace_buffer,
            "NHD",
            backend=self.decode_backend,
            use_tensor_cores=self.decode_use_tensor_cores,
            form=self._form,
            emission=self.emission,
            built=self._built,
            **buffers,
        )

    def _create_decode_wrappers(self, bs: int, num_tokens: int) -> list[EmittingDecodeWrapper]:
        assert bs <= self.emission.max_batch, (bs, self.emission.max_batch)
        return [
            self._wrapper(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=self.kv_indptr[0][: num_tokens + 1],
                paged_kv_indices_buffer=self.cuda_graph_kv_indices[0],
                paged_kv_last_page_len_buffer=self.kv_last_page_len[:num_tokens],
            )
        ]

    def forward_decode(  # type: ignore[override]  # the parameters of upstream's FlashInfer backend
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        assert isinstance(self.forward_metadata, DecodeMetadata)
        (wrapper,) = self.forward_metadata.decode_wrappers
        wrapper.layer = self.emission.index_of(layer.layer_id)
        output: torch.Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return output
