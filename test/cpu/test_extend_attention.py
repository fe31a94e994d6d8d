"""Extend attention: against its definition, and only for new rows."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_importance.cpu.attention import ExtendComputesCachedRows

HEADS, KV_HEADS, HEAD_DIM, SLOTS, MAX_CONTEXT = 4, 2, 16, 96, 40


@dataclass(frozen=True)
class Case:
    prefixes: tuple[int, ...]
    extends: tuple[int, ...]
    window: int | None = None
    causal: bool = True
    cache_dtype: torch.dtype = torch.float32


CASES = {
    "no prefix": Case((0,), (7,)),
    "cached prefix": Case((20,), (5,)),
    "one new token": Case((33,), (1,)),
    "batch": Case((0, 12, 3, 20), (9, 4, 1, 8)),
    "bidirectional": Case((6, 0), (5, 8), causal=False),
    "sliding window": Case((9, 0), (6, 11), window=4),
    "half-precision cache": Case((16,), (8,), cache_dtype=torch.bfloat16),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def run(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of the backend, and what attention is by definition; both [tokens, heads, head_dim]."""
    generator = torch.Generator().manual_seed(1)
    prefixes, extends = torch.tensor(case.prefixes), torch.tensor(case.extends)
    lengths = prefixes + extends
    requests = torch.randperm(len(case.extends), generator=generator)
    req_to_token = torch.zeros(len(case.extends), MAX_CONTEXT, dtype=torch.int64)
    free = torch.randperm(SLOTS, generator=generator)
    for request, length in zip(requests, lengths, strict=True):
        req_to_token[request, :length], free = free[:length], free[length:]
    query = torch.randn(int(extends.sum()), HEADS, HEAD_DIM, generator=generator)
    keys, values = torch.randn(2, SLOTS, KV_HEADS, HEAD_DIM, generator=generator).to(case.cache_dtype)

    output = TorchNativeAttnBackend._run_sdpa_forward_extend(
        SimpleNamespace(_make_sliding_window_mask=TorchNativeAttnBackend._make_sliding_window_mask),
        *(query, torch.full_like(query, torch.nan), keys, values),
        *(req_to_token, requests, lengths, prefixes, extends),
        scaling=0.3,
        enable_gqa=True,
        causal=case.causal,
        sliding_window_size=case.window,
    )

    expected = []
    start = 0
    for request, prefix, new in zip(requests.tolist(), case.prefixes, case.extends, strict=True):
        context = req_to_token[request, : prefix + new]
        for i in range(new):
            row = prefix + i
            first = 0 if case.window is None else max(0, row - case.window)
            seen = context[first : row + 1] if case.causal else context
            for head in range(HEADS):
                kv_head = head * KV_HEADS // HEADS
                logits = keys[seen, kv_head].double() @ query[start + i, head].double() * 0.3
                expected.append(logits.softmax(0) @ values[seen, kv_head].double())
        start += new
    return output, torch.stack(expected).view(-1, HEADS, HEAD_DIM)


def test_output_is_attention_by_definition(case: Case) -> None:
    output, expected = run(case)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_only_new_rows_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def count_rows(query: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        rows.append(query.shape[-2])
        return attend(query, *args, **kwargs)

    monkeypatch.setattr("sglang_importance.cpu.attention.scaled_dot_product_attention", count_rows)
    run(CASES["batch"])
    assert rows == list(CASES["batch"].extends)


def test_the_shim_looks_for_the_defect_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ExtendComputesCachedRows().needed()  # ours is in place

    def defective(self: object) -> None:
        per_req_query_redudant = None  # noqa: F841

    monkeypatch.setattr(TorchNativeAttnBackend, "_run_sdpa_forward_extend", defective)
    assert ExtendComputesCachedRows().needed()
