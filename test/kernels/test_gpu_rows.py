"""Rows on a device: read beside the steps that run, behind those that wrote them."""

from __future__ import annotations

import os
import time

import pytest
import torch

pytest.importorskip("sglang")

from sglang_importance.attention.rows import Phase, ScoreRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_a_row_is_read_while_a_later_step_runs() -> None:
    rows = ScoreRows(page_size=16, num_slots=3, max_context_tokens=4096, device="cuda")
    weights = torch.randn(8192, 8192, device="cuda")
    product = torch.empty_like(weights)
    torch.matmul(weights, weights, out=product)  # what the first call sets up
    forward, values = torch.cuda.Stream(), torch.rand(100, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(forward):
        rows.claim(1, Phase.PREFILL, "a", 100, 1)
        rows.of_phase(Phase.PREFILL).body[1, :100] += values
        rows.written(Phase.PREFILL, [1])
        for _ in range(50):
            torch.matmul(weights, weights, out=product)
        step_is_done = torch.cuda.Event()
        step_is_done.record()
    start = time.perf_counter()
    row = rows.consume(1, Phase.PREFILL)
    seconds = time.perf_counter() - start
    assert row is not None
    assert not step_is_done.query(), (
        "the reader waited for a step that has nothing to do with the row",
        f"{seconds:.3f} s",
        f"CUDA_DEVICE_MAX_CONNECTIONS={os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS')}",
    )
    assert row.body.tolist() == values.tolist()
    assert not rows.of_phase(Phase.PREFILL).any()
