"""Extend attention on the CPU against a loop over rows."""

from __future__ import annotations

import pytest
import torch

from sglang_importance.cpu.attention import extend_new_rows

HEAD_DIM, SLOTS, MAX_CONTEXT = 8, 128, 64


def naive_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, group: int
) -> torch.Tensor:
    """[num_heads, head_dim] of one query row over keys and values [num_keys, num_kv_heads, head_dim]."""
    heads = []
    for head in range(query.shape[0]):
        weights = torch.softmax(keys[:, head // group].double() @ query[head].double() * scaling, dim=0)
        heads.append(weights @ values[:, head // group].double())
    return torch.stack(heads).float()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("prefixes", [(0, 0, 0), (7, 0, 20), (1, 30, 16)])
@pytest.mark.parametrize("scaling", [None, 0.5])
def test_new_rows_equal_a_full_computation(
    causal: bool, num_kv_heads: int, prefixes: tuple[int, ...], scaling: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_heads, new = 4, (1, 9, 5)
    lengths = [prefix + count for prefix, count in zip(prefixes, new, strict=True)]
    query = torch.randn(sum(new), num_heads, HEAD_DIM, generator=generator)
    k_cache, v_cache = torch.randn(2, SLOTS, num_kv_heads, HEAD_DIM, generator=generator)
    slots = torch.randperm(SLOTS, generator=generator)
    req_to_token = torch.zeros(5, MAX_CONTEXT, dtype=torch.int64)
    rows = [3, 0, 4]
    for row, length, start in zip(rows, lengths, (0, 40, 80), strict=True):
        req_to_token[row, :length] = slots[start : start + length]

    output = torch.full_like(query, torch.nan)
    result = extend_new_rows(
        *(query, output, k_cache, v_cache, req_to_token, torch.tensor(rows)),
        *(torch.tensor(lengths), torch.tensor(prefixes), torch.tensor(new)),
        scaling=scaling,
        enable_gqa=num_kv_heads != num_heads,
        causal=causal,
    )

    assert result is output
    at = 0
    for row, length, prefix in zip(rows, lengths, prefixes, strict=True):
        for position in range(prefix, length):
            seen = req_to_token[row, : position + 1 if causal else length]
            expected = naive_row(
                *(query[at], k_cache[seen], v_cache[seen]),
                scaling=scaling or HEAD_DIM**-0.5,
                group=num_heads // num_kv_heads,
            )
            torch.testing.assert_close(output[at], expected, rtol=1e-4, atol=1e-5)
            at += 1
