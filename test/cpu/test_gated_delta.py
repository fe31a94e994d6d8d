"""Linear attention in torch, against the chunked algorithm of transformers' Qwen3-Next and its own layers."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import softplus

from sglang_importance.cpu import causal_convolution, gated_delta
from sglang_importance.cpu.experts import SharedExpertGate, gate_shared_output
from sglang_importance.cpu.gated_delta import GatedDeltaKernels, GatedNorm

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, SLOTS = 2, 6, 8, 5, 7
CHANNELS, WIDTH = 9, 4

lengths = st.lists(st.integers(1, 70), min_size=1, max_size=3)
seeds = st.integers(0, 2**16)


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def slots_of(lengths: list[int], seed: int) -> torch.Tensor:
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))
    return order[: len(lengths)].to(torch.int32)


def inputs(tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Of one layer: q, k [1, tokens, key heads, 8], v [1, tokens, value heads, 5], and what gates them."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(dtype)

    return {
        "q": draw(1, tokens, KEY_HEADS, KEY_DIM),
        "k": draw(1, tokens, KEY_HEADS, KEY_DIM),
        "v": draw(1, tokens, VALUE_HEADS, VALUE_DIM),
        "a": draw(tokens, VALUE_HEADS),
        "b": draw(tokens, VALUE_HEADS),
        "A_log": draw(VALUE_HEADS),
        "dt_bias": draw(VALUE_HEADS),
    }


def states(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(SLOTS, VALUE_HEADS, VALUE_DIM, KEY_DIM, generator=rng).to(dtype)


def by_transformers(given: dict[str, torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [1, tokens, value heads, 5] and the state behind them, in chunks of 64 tokens."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    group = VALUE_HEADS // KEY_HEADS
    outputs, behind = torch_chunk_gated_delta_rule(
        *(given[name].repeat_interleave(group, dim=2) for name in ("q", "k")),
        given["v"],
        g=(-given["A_log"].exp() * softplus(given["a"] + given["dt_bias"])).unsqueeze(0),
        beta=given["b"].sigmoid().unsqueeze(0),
        initial_state=state.transpose(-1, -2).unsqueeze(0),  # theirs maps keys to values
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return outputs, behind.squeeze(0).transpose(-1, -2)


def extend(
    given: dict[str, torch.Tensor], pool: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    decay, beta = torch.ops.sgl_kernel.fused_gdn_gating_cpu(
        given["A_log"], given["a"], given["b"], given["dt_bias"]
    )
    outputs, final, within = gated_delta.chunk_gated_delta_rule_cpu(
        *(given["q"], given["k"], given["v"], decay, beta),
        initial_state=pool,
        initial_state_indices=slots,
        cu_seqlens=starts,
        head_first=False,
        use_qk_l2norm_in_kernel=True,
    )
    assert final is None
    assert within is None
    return outputs


def decode(given: dict[str, torch.Tensor], pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu(
        **given,
        initial_state_source=pool,
        initial_state_indices=slots,
        cu_seqlens=torch.arange(len(slots) + 1, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0,
        softplus_threshold=20.0,
    )


def tokens_of(given: dict[str, torch.Tensor], start: int, end: int) -> dict[str, torch.Tensor]:
    cut = {name: given[name][:, start:end] for name in ("q", "k", "v")}
    return {**given, **cut, **{name: given[name][start:end] for name in ("a", "b")}}


def test_each_shim_looks_for_the_defect_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.kernels.ops.attention.fla import fused_norm_gate
    from sglang.kernels.ops.elementwise import elementwise

    assert not GatedDeltaKernels().needed()  # ours are in place
    assert not GatedNorm().needed()
    assert not SharedExpertGate().needed()
    monkeypatch.setattr(fused_norm_gate, "rms_norm_gated", None)
    assert GatedNorm().needed()
    monkeypatch.setattr(fused_norm_gate, "_use_cpu", True)  # upstream has its own for AMX
    assert not GatedNorm().needed()
    monkeypatch.setattr(elementwise, "_launch_fused_gate_sigmoid_mul", None)
    assert SharedExpertGate().needed()
    monkeypatch.delitem(sys.modules, gated_delta.MODULE)
    assert GatedDeltaKernels().needed()


def test_upstream_has_taken_ours() -> None:
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.kernels import gdn_triton

    assert gdn_backend.causal_conv1d_fn is causal_convolution.causal_conv1d_fn_cpu
    assert gdn_backend.causal_conv1d_update is causal_convolution.causal_conv1d_update_cpu
    assert gdn_backend.fused_gdn_gating is gated_delta.fused_gdn_gating_cpu
    assert gdn_triton.chunk_gated_delta_rule is gated_delta.chunk_gated_delta_rule_cpu
    update = gated_delta.fused_sigmoid_gating_delta_rule_update_cpu
    assert gdn_triton.fused_sigmoid_gating_delta_rule_update is update


@given(lengths, seeds)
def test_sequences_go_on_from_their_own_states(lengths: list[int], seed: int) -> None:
    given_, pool, slots = inputs(sum(lengths), seed), states(seed), slots_of(lengths, seed)
    before, starts = pool.clone(), bounds(lengths)
    outputs = extend(given_, pool, slots, starts)
    for slot, (start, end) in zip(slots.tolist(), pairwise(starts.tolist()), strict=True):
        expected, behind = by_transformers(tokens_of(given_, start, end), before[slot])
        torch.testing.assert_close(outputs[:, start:end], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(pool[slot], behind, rtol=1e-4, atol=1e-4)
    others = [slot for slot in range(SLOTS) if slot not in slots.tolist()]
    assert torch.equal(pool[others], before[others])


@given(st.integers(2, 40), st.data())
def test_cut_anywhere_a_sequence_gives_the_same(tokens: int, data: st.DataObject) -> None:
    """In chunks of a prompt, and token after token as in decoding."""
    given_, whole, cut = inputs(tokens, 1), states(2), states(2)
    slot, edge = torch.tensor([3]), data.draw(st.integers(1, tokens - 1))
    expected = extend(given_, whole, slot, bounds([tokens]))
    first = extend(tokens_of(given_, 0, edge), cut, slot, bounds([edge]))
    rest = [decode(tokens_of(given_, each, each + 1), cut, slot) for each in range(edge, tokens)]
    torch.testing.assert_close(torch.cat([first, *rest], dim=1), expected)
    torch.testing.assert_close(cut, whole)


def test_rows_of_no_request_leave_every_state() -> None:
    given_, pool = inputs(3, 1), states(1)
    before = pool.clone()
    outputs = decode(given_, pool, torch.tensor([-1, 4, -1]))
    assert not outputs[:, [0, 2]].any()
    assert outputs[:, 1].any()
    changed = [slot for slot in range(SLOTS) if not torch.equal(pool[slot], before[slot])]
    assert changed == [4]


def test_dtypes_of_the_model_and_of_the_pool_are_kept() -> None:
    given_, pool = inputs(5, 1, torch.bfloat16), states(1, torch.bfloat16)
    wide = {name: tensor.float() for name, tensor in given_.items()}
    expected, behind = by_transformers(wide, pool[2].float())
    outputs = extend(given_, pool, torch.tensor([2]), bounds([5]))
    assert outputs.dtype == pool.dtype == torch.bfloat16
    torch.testing.assert_close(outputs, expected.bfloat16(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(pool[2], behind.bfloat16(), rtol=2e-2, atol=2e-2)


# ---- the convolution in front ----


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: torch.Tensor
) -> torch.Tensor:
    """By definition, [channels, tokens]: each output a sum over the newest inputs, then SiLU."""
    seen = torch.cat([window, x], dim=1)
    sums = [(seen[:, token : token + WIDTH] * weight).sum(1) for token in range(x.shape[1])]
    outputs = torch.stack(sums, dim=1) + (0 if bias is None else bias[:, None])
    return outputs * outputs.sigmoid()


@given(lengths, st.lists(st.booleans(), min_size=3, max_size=3), st.booleans(), seeds)
def test_each_sequence_is_convolved_behind_its_own_window(
    lengths: list[int], going_on: list[bool], biased: bool, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(CHANNELS, sum(lengths), generator=rng)
    weight = torch.randn(CHANNELS, WIDTH, generator=rng)
    bias = torch.randn(CHANNELS, generator=rng) if biased else None
    pool = torch.randn(SLOTS, CHANNELS, WIDTH - 1, generator=rng)
    before, starts, slots = pool.clone(), bounds(lengths), slots_of(lengths, seed)
    outputs = causal_convolution.causal_conv1d_fn_cpu(
        *(x, weight, bias),
        activation="silu",
        conv_states=pool,
        has_initial_state=torch.tensor(going_on[: len(lengths)]),
        cache_indices=slots,
        query_start_loc=starts,
        seq_lens_cpu=lengths,
    )
    for slot, goes_on, (start, end) in zip(slots.tolist(), going_on, pairwise(starts.tolist()), strict=False):
        window = before[slot] if goes_on else torch.zeros(CHANNELS, WIDTH - 1)
        sequence = x[:, start:end]
        torch.testing.assert_close(outputs[:, start:end], convolved(sequence, weight, bias, window))
        assert torch.equal(pool[slot], torch.cat([window, sequence], dim=1)[:, -(WIDTH - 1) :])


def test_a_convolution_is_the_same_token_after_token() -> None:
    rng = torch.Generator().manual_seed(1)
    x, weight = torch.randn(CHANNELS, 9, generator=rng), torch.randn(CHANNELS, WIDTH, generator=rng)
    whole, cut = torch.zeros(2, SLOTS, CHANNELS, WIDTH - 1)
    slot = torch.tensor([5])
    outputs = causal_convolution.causal_conv1d_fn_cpu(
        *(x, weight, None),
        activation="silu",
        conv_states=whole,
        has_initial_state=torch.tensor([False]),
        cache_indices=slot,
        query_start_loc=bounds([9]),
    )
    steps = [
        causal_convolution.causal_conv1d_update_cpu(
            x[:, token].unsqueeze(0), cut, weight, None, "silu", conv_state_indices=slot
        )
        for token in range(9)
    ]
    torch.testing.assert_close(torch.cat(steps).T, outputs)
    assert torch.equal(cut, whole)
    nobody = torch.tensor([-1])
    padded = causal_convolution.causal_conv1d_update_cpu(
        torch.ones(1, CHANNELS), cut, weight, None, "silu", conv_state_indices=nobody
    )
    assert not padded.any()
    assert torch.equal(cut, whole)


# ---- what stands around it in a layer ----


def test_the_norm_behind_it_is_that_of_transformers() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    norm = Qwen3NextRMSNormGated(VALUE_DIM, eps=1e-6)
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    x, gate = torch.randn(2, 11, VALUE_DIM, generator=torch.Generator().manual_seed(2))
    normed = gated_delta.rms_norm_gated(x, gate, norm.weight, None, "silu", eps=1e-6)
    torch.testing.assert_close(normed, norm(x, gate))


@pytest.mark.parametrize("do_add", [True, False])
def test_a_shared_expert_is_gated(do_add: bool) -> None:
    rng = torch.Generator().manual_seed(1)
    hidden, shared, output = (torch.randn(4, CHANNELS, generator=rng) for _ in range(3))
    gate = torch.nn.Linear(CHANNELS, 1, bias=False)
    expected = gate(hidden).sigmoid() * shared + (output if do_add else 0)
    with torch.no_grad():
        gate_shared_output(hidden, gate.weight.squeeze(), shared, output, do_add=do_add)
    torch.testing.assert_close(output, expected)
