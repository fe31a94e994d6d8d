"""The score_mod inside upstream's own Triton decode kernels, in the interpreter or on a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sgl_importance_kernels.triton.score_mod as score_mod
from sgl_importance_kernels.triton.log_sums import DecodeLogSums
from sgl_importance_kernels.triton.page_reduction import reduce_log_sums

from support.doubles.twins import Mutation, broken_twin
from support.nightly_cases import rest_nightly
from support.workloads.probe_case import POISON, ProbeCase, as_array

decode_attention = pytest.importorskip("sglang.kernels.ops.attention.decode_attention")

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]


def decode(case: ProbeCase, layer: int, splits: int, **emission: Any) -> torch.Tensor:
    """Upstream's decode attention over the case's keys, values equal to the keys."""
    q = torch.stack([case.q[layer][int(row)] for row in case.queries.first_query_rows])
    k = case.k[layer].nan_to_num(0.0).clamp(-100, 100)
    lengths = case.queries.seq_lens
    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=case.device)
    indptr[1:] = lengths.cumsum(0)
    indices = torch.cat(case.tables).to(torch.int32).to(case.device)
    heads = q.shape[1]
    output = torch.empty_like(q)
    decode_attention.decode_attention_fwd(
        q,
        k,
        k,
        output,
        indptr,
        indices,
        torch.zeros(len(lengths), heads, splits, case.head_dim, device=case.device),
        torch.zeros(len(lengths), heads, splits, device=case.device),
        torch.full((len(lengths),), splits, dtype=torch.int32, device=case.device),
        splits,
        case.scale,
        1.0,
        1.0,
        logit_cap=case.logit_cap,
        **emission,
    )
    return output


def emitted(
    case: ProbeCase,
    *,
    splits: int = 4,
    observed: list[bool] | None = None,
    mods: Any = score_mod,
    checks_outputs: bool = True,
) -> np.ndarray:
    """Rows after one decode step of upstream's kernels with the score_mod, over the observed requests."""
    batch = len(case.sequences)
    chosen = [i for i in range(batch) if observed is None or observed[i]]
    log_sums = DecodeLogSums(
        num_layers=case.num_layers,
        max_observed=len(chosen) + 4,  # Twins may write behind their rows.
        max_batch=batch + 3,
        num_heads=case.num_kv_heads * case.group,
        max_pages=case.max_pages + 2,
        sink_tokens=case.sink_tokens,
        local_tokens=case.local_tokens,
        device=case.device,
    )
    log_sums.values.fill_(POISON)
    rows_of_batch = torch.full((batch + 3,), -1, dtype=torch.int32)
    # The last request first: a row is no index of the batch.
    rows_of_batch[chosen] = torch.arange(len(chosen), dtype=torch.int32).flip(0)
    log_sums.observe(rows_of_batch.to(case.device))
    for layer in range(case.num_layers):
        aux = (log_sums.aux(layer),)
        output = decode(case, layer, splits, score_mod=mods.SCORE_MODS[case.page_size], aux_tensors=aux)
        if checks_outputs:
            assert torch.equal(output, decode(case, layer, splits)), "the score_mod changed an output"
    if not chosen:
        assert (log_sums.values == POISON).all()
    rows = case.empty_rows()
    reduce_log_sums(
        log_sums,
        case.queries.only(chosen[::-1]) if chosen else case.queries,
        rows,
        gate=case.gate(int(bool(chosen))),
        page_size=case.page_size,
        sink_tokens=case.sink_tokens,
        local_tokens=case.local_tokens,
    )
    return as_array(rows)


@settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(data=st.data())
def test_rows_are_those_of_the_definition(data: st.DataObject, device: str) -> None:
    draw = data.draw
    lengths = draw(st.lists(st.integers(1, 200), min_size=1, max_size=2))
    case = ProbeCase(
        [(length, 1) for length in lengths],
        page_size=draw(st.sampled_from(sorted(score_mod.SCORE_MODS))),
        num_kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 4, 8])),
        num_layers=1,
        logit_cap=draw(st.sampled_from([0.0, 3.0])),
        sink_tokens=draw(st.sampled_from([0, 4, 17])),
        local_tokens=draw(st.sampled_from([0, 1, 16])),
        seed=draw(st.integers(0, 2**32)),
        device=device,
    )
    got = emitted(case, splits=draw(st.sampled_from([1, 2, 4])))
    np.testing.assert_allclose(got, case.expected(), atol=2e-5, rtol=1e-4)


FIXED = ProbeCase([(150, 1), (70, 1)], page_size=8, sink_tokens=5, local_tokens=7, num_layers=1)


@pytest.mark.parametrize("group", rest_nightly([4, 1]))
def test_a_step_without_observed_requests_writes_nothing(group: int, device: str) -> None:
    assert not emitted(replace(FIXED, group=group, device=device), observed=[False, False]).any()


@pytest.mark.parametrize("group", rest_nightly([4, 1]))
@pytest.mark.parametrize("observed", rest_nightly([[False, True], [True, False]]))
def test_only_observed_requests_emit(group: int, observed: list[bool], device: str) -> None:
    case = replace(FIXED, group=group, device=device)
    expected = case.expected()
    other = int(case.queries.slots[observed.index(False)])
    expected[:, other] = 0
    np.testing.assert_allclose(emitted(case, observed=observed), expected, atol=2e-5)


TWINS = [
    Mutation("one_page_off", "axis=2) // PAGE_SIZE", "axis=2) // PAGE_SIZE + 1"),
    Mutation("one_head_lost", "+ head * stride_h", "+ (head | 1) * stride_h"),
    Mutation("stale_tail", "tl.where(visible, logits, float", "tl.where(token >= 0, logits, float"),
    Mutation("first_request_only", "tl.load(Aux0 + 2 + q_idx)", "tl.load(Aux0 + 2 + q_idx * 0)"),
    Mutation("batch_index_for_row", "row * stride_t,", "(q_idx + 1) * stride_t,"),
    Mutation("sinks_in_the_body", "(token >= sink_tokens)", "(token >= 0)"),
    Mutation("query_in_the_body", "tl.maximum(q_pos + 1 - local_tokens, 0)", "q_pos + 1"),
]


@pytest.mark.nightly
def test_the_fixed_case_passes_unbroken(device: str) -> None:
    case = replace(FIXED, device=device)
    np.testing.assert_allclose(emitted(case), case.expected(), atol=2e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("mutation", TWINS, ids=str)
def test_broken_twins_are_told_apart(mutation: Mutation, device: str, tmp_path: Path) -> None:
    case = replace(FIXED, device=device)
    expected = case.expected()
    twin = broken_twin(score_mod, mutation, tmp_path)
    assert not np.allclose(emitted(case, mods=twin, checks_outputs=False), expected, atol=1e-3)


def test_upstream_aligns_tiles_to_whole_pages() -> None:
    assert decode_attention._MIN_BLOCK_KV % max(score_mod.SCORE_MODS) == 0
