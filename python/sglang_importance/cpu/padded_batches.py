"""Batches that data-parallel attention pads, without a GPU."""

from __future__ import annotations

from sglang_importance.cpu.shim import Shim


class PaddedBatches(Shim):
    defect = (
        "torch_native does not say which sequence length stands for a padded request, which data-parallel "
        "attention asks every backend on a CPU (model_executor/forward_batch_info.py:1801)"
    )

    def needed(self) -> bool:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        return not hasattr(TorchNativeAttnBackend, "get_cpu_graph_seq_len_fill_value")

    def apply(self) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        # As upstream's other backend for CPUs has it; one token, so that softmax has something to sum.
        TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda backend: 1  # type: ignore[attr-defined]
