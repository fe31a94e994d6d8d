"""Padded requests of data-parallel attention beside torch_native."""

from __future__ import annotations

import pytest
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_importance.cpu.defaults import PaddedBatches


def test_the_shim_looks_for_the_defect_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not PaddedBatches().needed()  # ours is in place
    monkeypatch.delattr(TorchNativeAttnBackend, "get_cpu_graph_seq_len_fill_value")
    assert PaddedBatches().needed()
    PaddedBatches().apply()
    assert not PaddedBatches().needed()
    backend = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
    assert backend.get_cpu_graph_seq_len_fill_value() == 1
