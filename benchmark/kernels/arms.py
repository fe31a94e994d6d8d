"""What is timed: stock attention, the emitting variant in its states, the reduction and qk-probe."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from decode_shape import LAYERS, Inputs
from timing import Step
from torch_decode import TorchDecode

from sgl_importance_kernels.flashinfer import EmittingDecode
from sgl_importance_kernels.page_rows import PageRows
from sgl_importance_kernels.triton.log_sums import LogSums
from sgl_importance_kernels.triton.logit_reduction import DecodeLogits, reduce_logits
from sgl_importance_kernels.triton.page_reduction import reduce_log_sums
from sgl_importance_kernels.triton.qk_probe import probe_layer
from sgl_importance_lab.conformance.page_scores import combine_layers, layer_page_scores

BODY = {"sink_tokens": 4, "local_tokens": 16}
WORKSPACE_BYTES = 256 << 20
HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None


def expected_rows(inputs: Inputs) -> PageRows:
    """Rows of the step by the definition."""
    shape, rows = inputs.shape, PageRows.zeros(inputs.shape.batch, inputs.max_pages, "cpu")
    for request in range(shape.batch):
        locations = inputs.indices[int(inputs.indptr[request]) : int(inputs.indptr[request + 1])].long()
        scores = combine_layers(
            [
                layer_page_scores(
                    inputs.q[layer][request : request + 1].cpu(),
                    inputs.k[layer][locations].cpu(),
                    torch.tensor([shape.context - 1]),
                    scale=shape.scale,
                    page_size=shape.page_size,
                    **BODY,
                )
                for layer in range(LAYERS)
            ]
        )
        rows.body[request], rows.peak[request] = scores.body[0], scores.peak[0]
        rows.mass[request] = scores.mass[0].sum()
    return rows


class ProbeArm:
    """qk-probe over every layer and its reduction."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._queries = inputs.queries()
        self.rows = inputs.rows()
        self._log_sums = LogSums(
            num_layers=LAYERS,
            max_requests=inputs.shape.batch,
            max_queries=1,
            num_heads=inputs.shape.heads,
            max_pages=inputs.max_pages,
            device=inputs.device,
        )

    def step(self) -> None:
        inputs = self._inputs
        settings: dict[str, Any] = {"gate": inputs.gate, "page_size": inputs.shape.page_size, **BODY}
        for layer in range(LAYERS):
            probe_layer(
                inputs.q[layer],
                inputs.k[layer],
                self._queries,
                self._log_sums,
                layer,
                scale=inputs.shape.scale,
                **settings,
            )
        reduce_log_sums(self._log_sums, self._queries, self.rows, **settings)


class DecodeArms:
    """FlashInfer's paged decode, stock and with our variant, over the same inputs.

    Args:
        exact: plain torch in FlashInfer's place, and logits in single precision.
    """

    def __init__(self, inputs: Inputs, *, tensor_cores: bool, exact: bool = False) -> None:
        shape = inputs.shape
        self._inputs = inputs
        self._stands_in = exact or inputs.device == "cpu"
        self.gate = torch.ones(1, dtype=torch.int32, device=inputs.device)
        self.starts = torch.empty_like(inputs.indptr[:-1])
        self._nobody = torch.full_like(self.starts, -1)
        self.open(True)
        self.emitted = DecodeLogits(
            num_layers=LAYERS,
            num_kv_heads=shape.kv_heads,
            group=shape.group,
            max_tokens=shape.tokens,
            max_requests=shape.batch,
            max_pages=inputs.max_pages,
            dtype=torch.float32 if exact else torch.float16,
            device=inputs.device,
        )
        self.rows = inputs.rows()
        self._observed = inputs.observed()
        form = EmittingDecode(
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            kv_dtype=shape.dtype,
            logit_dtype=self.emitted.logits.dtype,
            tensor_cores=tensor_cores,
        )
        self._stock = self._planned(tensor_cores, None)
        self._ours = self._planned(tensor_cores, form.jit_args())
        self.stock_outputs = [torch.empty_like(q) for q in inputs.q]
        self.outputs = [torch.empty_like(q) for q in inputs.q]

    def _planned(self, tensor_cores: bool, jit_args: list[Any] | None) -> Any:
        inputs, shape = self._inputs, self._inputs.shape
        last_page = torch.ones(shape.batch, dtype=torch.int32, device=inputs.device)
        wrapper = self._wrapper_class()(
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.device),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=inputs.indptr.clone(),
            paged_kv_indices_buffer=inputs.indices.clone(),
            paged_kv_last_page_len_buffer=last_page.clone(),
            backend="fa2",
            **({} if jit_args is None else {"jit_args": jit_args}),
        )
        wrapper.plan(
            inputs.indptr,
            inputs.indices,
            last_page,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            1,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        return wrapper

    def _wrapper_class(self) -> type[Any]:
        if self._stands_in:
            return TorchDecode
        import flashinfer

        return flashinfer.BatchDecodeWithPagedKVCacheWrapper

    def _cache(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Pages of one token, as SGLang plans them.
        return self._inputs.k[layer].unsqueeze(1), self._inputs.v[layer].unsqueeze(1)

    def open(self, is_open: bool) -> None:
        """Whether the next steps, captured or not, observe every request or none."""
        self.gate.fill_(int(is_open))
        self.starts.copy_(self._inputs.indptr[:-1] if is_open else self._nobody)

    def stock(self) -> None:
        for layer in range(LAYERS):
            self.run_stock(layer)

    def run_stock(self, pool: int) -> None:
        self._stock.run(self._inputs.q[pool], self._cache(pool), out=self.stock_outputs[pool])

    def run_ours(self, pool: int, index: int | None) -> None:
        """One layer through the variant; ``index`` among the sampled ones, None where it is not sampled."""
        logits = self.emitted.logits[index or 0]
        sampled = {} if index is None else {"lse": self.emitted.log_sums[index], "return_lse": True}
        self._ours.run(
            self._inputs.q[pool],
            self._cache(pool),
            logits,
            self._nobody if index is None else self.starts,
            self._inputs.shape.scale,
            0.0,
            logits.stride(0),
            out=self.outputs[pool],
            **sampled,
        )

    def emitting(self) -> None:
        """One step through the variant: emits or not, as the starts say."""
        for layer in range(LAYERS):
            self.run_ours(layer, layer)

    def reduce(self) -> None:
        reduce_logits(
            self.emitted,
            self._observed,
            self.rows,
            gate=self.gate,
            max_seq_len=self._inputs.shape.context,
            page_size=self._inputs.shape.page_size,
            log_sums_in_base_2=True,
            **BODY,
        )

    def emitting_and_reduction(self) -> None:
        self.emitting()
        self.reduce()


def decode_arms(arms: DecodeArms) -> dict[str, Step]:
    return {"stock": arms.stock, "emitting": arms.emitting, "emitting+reduction": arms.emitting_and_reduction}
