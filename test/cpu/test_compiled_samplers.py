"""Part of sampling that sglang compiles at its first use, on a machine without an accelerator."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.sampling import sampling_batch_info
from sglang.srt.sampling.penaltylib import repetition_penalty

from sglang_importance.cpu.defaults import CompiledSamplers


def test_what_sglang_compiles_runs_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not CompiledSamplers().needed()  # ours is in place
    compiled = torch.compile(repetition_penalty.apply_scaling_penalties, dynamic=True)
    monkeypatch.setattr(repetition_penalty, "apply_scaling_penalties", compiled)
    monkeypatch.setattr(sampling_batch_info, "apply_scaling_penalties", compiled)
    assert CompiledSamplers().needed()
    CompiledSamplers().apply()
    assert not CompiledSamplers().needed()
    logits = torch.tensor([[2.0, -2.0]])
    sampling_batch_info.apply_scaling_penalties(logits, torch.tensor([[2.0, 2.0]]))
    assert logits.tolist() == [[1.0, -4.0]]
