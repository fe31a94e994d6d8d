"""The probe and its reduction against the definition; in the interpreter or on a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sgl_importance_kernels.triton.page_reduction as page_reduction
import sgl_importance_kernels.triton.qk_probe as qk_probe
from sgl_importance_kernels.page_rows import PageRows
from sgl_importance_kernels.triton.log_sums import LogSums

from support.doubles.twins import Mutation, broken_twin
from support.nightly_cases import rest_nightly
from support.workloads import probe_case
from support.workloads.probe_case import ProbeCase, as_array, probe_cases

pytestmark = [
    pytest.mark.triton,
    # log(0) is -inf in the kernels by design; numpy warns of it.
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]

TOLERANCE = 2e-5  # Of a sum over 5 query tokens in float32; logits up to 60 have a rounding error of 4e-6.
RAGGED = [(100, 1), (37, 3), (260, 2), (9, 0)]
SHORT = [(70, 1), (37, 3), (9, 0)]
FP8 = torch.float8_e4m3fn


def check(case: ProbeCase) -> None:
    np.testing.assert_allclose(case.probed(), case.expected(), atol=TOLERANCE, rtol=1e-4)


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(data=st.data())
def test_rows_are_those_of_the_definition(data: st.DataObject, device: str) -> None:
    check(data.draw(probe_cases(device)))


@pytest.mark.parametrize("page_size", rest_nightly([3, 16, 1, 64, 256]))
def test_page_sizes(page_size: int, device: str) -> None:
    check(ProbeCase(RAGGED, page_size=page_size, num_layers=1, num_kv_heads=1, device=device))


@pytest.mark.parametrize(
    ("group", "head_dim"), rest_nightly([(7, 96), (1, 128), (4, 64), (8, 128), (8, 256)])
)
def test_head_sizes_and_groups(group: int, head_dim: int, device: str) -> None:
    check(ProbeCase([(70, 1), (20, 2)], group=group, head_dim=head_dim, num_layers=1, device=device))


def test_a_full_observation_window(device: str) -> None:
    check(ProbeCase([(50, 32), (9, 9)], group=2, num_layers=1, num_kv_heads=1, device=device))


@pytest.mark.parametrize(
    ("key_dtype", "query_dtype"),
    rest_nightly(
        [
            (torch.bfloat16, torch.bfloat16),
            (FP8, torch.bfloat16),
            (torch.float16, torch.float16),
            (torch.float32, torch.bfloat16),
            (FP8, torch.float16),
            (torch.float8_e5m2, torch.bfloat16),
        ],
    ),
)
def test_key_dtypes(key_dtype: torch.dtype, query_dtype: torch.dtype, device: str) -> None:
    dtypes = {"key_dtype": key_dtype, "query_dtype": query_dtype}
    check(ProbeCase(SHORT, key_scale=0.7, num_layers=1, device=device, **dtypes))


def test_more_splits_than_blocks_and_fewer(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = ProbeCase([(1000, 1), (5, 1)], num_layers=1, num_kv_heads=1, device=device)
    for programs in (1, 6, 10_000):
        monkeypatch.setattr(qk_probe, "TARGET_PROGRAMS", programs)
        check(case)


def test_a_closed_gate_writes_nothing(device: str) -> None:
    case = ProbeCase(SHORT, device=device)
    assert not case.probed(gate=0).any()


def test_steps_add_up_and_other_rows_stay(device: str) -> None:
    case = ProbeCase(SHORT, num_kv_heads=1, device=device)
    rows = case.empty_rows()
    for accumulated in rows:
        accumulated.fill_(0.25)
    before = as_array(rows)
    once = case.probed(rows=rows)
    twice = case.probed(rows=rows)
    body, peak, mass = case.expected()
    untouched = mass[:, 0] == 0
    np.testing.assert_array_equal(twice[:, untouched], before[:, untouched])
    for times, (bodies, peaks, masses) in ((1, once), (2, twice)):
        np.testing.assert_allclose(bodies, 0.25 + times * body, atol=times * TOLERANCE)
        np.testing.assert_allclose(peaks, peak.clip(min=0.25), atol=TOLERANCE)
        np.testing.assert_allclose(masses[:, 0], 0.25 + times * mass[:, 0], atol=times * TOLERANCE)


@pytest.mark.nightly
def test_the_same_step_gives_the_same_bits(device: str) -> None:
    case = ProbeCase(SHORT, num_kv_heads=1, device=device)
    np.testing.assert_array_equal(case.probed()[:2], case.probed()[:2])


def test_a_body_below_float32_precision_is_empty(device: str) -> None:
    case = ProbeCase([(40, 2)], page_size=4, sink_tokens=1, local_tokens=3, num_layers=1, device=device)
    case.q[0].fill_(1.0)
    case.k[0].zero_()
    case.k[0][case.tables[0][0]] = 100.0
    rows = case.probed()
    assert not rows[0].any()
    np.testing.assert_allclose(rows, case.expected(), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"value_head_dim": 512, "head_dim": 576}, "latent attention"),
        ({"head_dim": 512, "value_head_dim": 512}, "heads of 512 dimensions"),
        ({"key_dtype": torch.uint8}, "keys in torch.uint8"),
        ({"query_dtype": FP8}, "queries in torch.float8_e4m3fn"),
        ({"num_heads": 6, "num_kv_heads": 4}, "6 query heads over 4 KV heads"),
    ],
)
def test_layers_that_cannot_be_probed_are_named(layer: dict[str, Any], words: str) -> None:
    fine = {
        "key_dtype": FP8,
        "query_dtype": torch.bfloat16,
        "head_dim": 128,
        "value_head_dim": 128,
        "num_heads": 32,
        "num_kv_heads": 8,
    }
    assert qk_probe.refusal(**fine) is None
    why = qk_probe.refusal(**(fine | layer))
    assert why is not None
    assert words in why


FIXED = ProbeCase([(60, 3), (200, 1)], page_size=8, sink_tokens=5, local_tokens=6, logit_cap=8.0)
"""Several blocks, heads, layers, window tokens and partial borders: no mutation below can hide in it."""

PROBE_TWINS = [
    Mutation("one_page_off", "locations + token, mask=exists", "locations + token + PAGE_SIZE, mask=exists"),
    Mutation(
        "one_head_swapped",
        "location[None, :] * k_stride_row + kv_head",
        "location[None, :] * k_stride_row + (1 - kv_head)",
    ),
    Mutation("stale_split", "(split + 1) * per_split, num_blocks", "(split + 1) * per_split, num_blocks - 1"),
    Mutation("not_causal", "(token[None, :] <= position[:, None])", "(token[None, :] < seq_len)"),
    Mutation("sinks_in_the_body", ">= sink_tokens)", ">= sink_tokens - 1)"),
    Mutation(
        "query_in_the_body", "(token[None, :] < body_end[:, None])", "(token[None, :] <= body_end[:, None])"
    ),
    Mutation("first_query_only", "q_row[:, None] * q_stride_row", "0 * q_row[:, None] * q_stride_row"),
    Mutation("no_scale", 'input_precision="ieee") * scale', 'input_precision="ieee")'),
    Mutation("no_cap", "if LOGIT_CAP > 0:", "if LOGIT_CAP < 0:"),
]

REDUCTION_TWINS = [
    Mutation("one_head_lost", "is_head = head < NUM_HEADS\n", "is_head = head < NUM_HEADS - 1\n"),
    Mutation("one_layer_lost", "range(NUM_LAYERS)", "range(NUM_LAYERS - 1)"),
    Mutation(
        "wrong_row",
        "tl.load(Slots + request).to(tl.int64)\n    out",
        "(tl.load(Slots + request) ^ 1).to(tl.int64)\n    out",
    ),
    Mutation("last_query_lost", "range(num_queries):", "range(num_queries - 1):"),
    Mutation("body_not_normalised", "body / tl.where(has_body, body_total, 1.0)", "body"),
    Mutation("another_s_partials", "2 * (request * max_queries + query)", "2 * (request * max_queries)"),
    Mutation(
        "peak_summed", "tl.maximum(peak, tl.max(probability, axis=0))", "peak + tl.max(probability, axis=0)"
    ),
    Mutation(
        "body_total_of_all",
        "tl.store(total + 1 + tl.arange(0, 1), body)",
        "tl.store(total + 1 + tl.arange(0, 1), everything)",
    ),
]


def is_told_apart(case: ProbeCase) -> bool:
    return not np.allclose(case.probed(), case.expected(), atol=1e-3)


@pytest.mark.nightly
def test_the_fixed_case_passes_unbroken(device: str) -> None:
    check(replace(FIXED, device=device))


@pytest.mark.nightly
@pytest.mark.parametrize("mutation", PROBE_TWINS, ids=str)
def test_broken_probes_are_told_apart(
    mutation: Mutation, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_case, "probe_layer", broken_twin(qk_probe, mutation, tmp_path).probe_layer)
    assert is_told_apart(replace(FIXED, device=device))


@pytest.mark.nightly
@pytest.mark.parametrize("mutation", REDUCTION_TWINS, ids=str)
def test_broken_reductions_are_told_apart(
    mutation: Mutation, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = broken_twin(page_reduction, mutation, tmp_path)
    monkeypatch.setattr(probe_case, "reduce_log_sums", twin.reduce_log_sums)
    assert is_told_apart(replace(FIXED, device=device))


def test_only_the_first_axis_of_a_grid_grows_with_requests_times_queries(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """CUDA allows 65535 blocks on the others."""
    grids = []

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(page_reduction, "_totals_kernel", Recorded())
    monkeypatch.setattr(page_reduction, "_rows_kernel", Recorded())
    monkeypatch.setattr(page_reduction, "_partials_kernel", Recorded())
    requests, window = 3000, 32
    queries = ProbeCase([(40, window)], device=device).queries.only([0] * requests)
    log_sums = LogSums(
        num_layers=4, max_requests=requests, max_queries=window, num_heads=128, max_pages=8, device="meta"
    )
    rows = PageRows(*torch.zeros(2, 1, 8, device="meta"), torch.zeros(1, device="meta"))
    body = {"sink_tokens": 4, "local_tokens": 16}
    page_reduction.reduce_log_sums(log_sums, queries, rows, gate=rows.mass, page_size=16, **body)
    assert len(grids) == 3
    assert requests * window > 65535
    assert all(extent <= 65535 for grid in grids for extent in grid[1:])


def test_query_tokens_at_once_give_the_bits_of_one_after_the_other(device: str) -> None:
    """The partials of a window, and as many steps of one token each over the same log-sums."""
    case = ProbeCase([(75, 6), (40, 3), (17, 1)], device=device)
    body = {"page_size": 16, "sink_tokens": case.sink_tokens, "local_tokens": case.local_tokens}
    together = case.log_sums()
    for layer, (q, k) in enumerate(zip(case.q, case.k, strict=True)):
        probe_case.probe_layer(
            q, k, case.queries, together, layer, gate=case.gate(), scale=case.scale, **body
        )
    at_once = case.empty_rows()
    page_reduction.reduce_log_sums(together, case.queries, at_once, gate=case.gate(), **body)
    in_turn = case.empty_rows()
    single = LogSums(
        num_layers=case.num_layers,
        max_requests=1,
        max_queries=1,
        num_heads=case.num_kv_heads * case.group,
        max_pages=together.max_pages,
        device=device,
    )
    for request, (length, num_q) in enumerate(case.sequences):
        for query in range(num_q):
            single.values[:, 0] = together.values[:, request * together.max_queries + query]
            one = case.queries.only([request])
            one.seq_lens.fill_(length - num_q + query + 1)
            one.num_queries.fill_(1)
            page_reduction.reduce_log_sums(single, one, in_turn, gate=case.gate(), **body)
    assert single.partials is None
    assert torch.equal(at_once.body, in_turn.body)
    assert torch.equal(at_once.peak, in_turn.peak)
    assert torch.allclose(at_once.mass, in_turn.mass)
    assert at_once.body.any()
