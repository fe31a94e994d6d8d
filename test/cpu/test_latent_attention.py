"""DeepSeek's attention beside torch_native: absorbed in every pass, where upstream has no method for it."""

from __future__ import annotations

import pytest
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

from sglang_importance.cpu.defaults import AbsorbedLatentAttention


def test_every_pass_reads_the_latents_in_the_pool() -> None:
    assert AttentionBackendRegistry.get_handler("torch_native")(None, None) is AttnForwardMethod.MLA


def test_the_shim_looks_for_the_defect_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not AbsorbedLatentAttention().needed()  # ours is in place
    handlers = dict(AttentionBackendRegistry._handlers)
    del handlers["torch_native"]
    monkeypatch.setattr(AttentionBackendRegistry, "_handlers", handlers)
    assert AbsorbedLatentAttention().needed()
    assert AttentionBackendRegistry.get_handler("torch_native") is handlers["triton"]
    AbsorbedLatentAttention().apply()
    assert not AbsorbedLatentAttention().needed()
