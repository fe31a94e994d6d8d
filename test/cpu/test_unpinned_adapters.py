"""LoRA adapters on a machine that cannot pin memory."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.lora import layers
from sglang.srt.lora.backend import torch_backend

from sglang_importance.cpu.unpinned_adapters import UnpinnedAdapters


@pytest.fixture
def as_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler's process in which no shim has been applied."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace())
    for module in (layers, torch_backend):
        monkeypatch.setattr(module, "torch", torch)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.pin_memory)


@pytest.mark.usefixtures("as_found")
def test_nothing_is_pinned_any_more() -> None:
    shim = UnpinnedAdapters()
    assert shim.needed()
    shim.apply()
    assert not shim.needed()
    for module in (layers, torch_backend):
        made = module.torch.tensor([1, 2], dtype=torch.int32, device="cpu", pin_memory=True)
        assert made.tolist() == [1, 2]
        assert made.pin_memory() is made
        assert module.torch.float32 is torch.float32


def test_a_launcher_holds_no_adapters() -> None:
    assert not UnpinnedAdapters().needed()
