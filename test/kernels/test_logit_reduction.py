"""The reduction of decode logits against the definition; in the interpreter or on a device."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sgl_importance_kernels.triton.logit_reduction as logit_reduction
from sgl_importance_kernels.page_rows import PageRows

from support.doubles.twins import Mutation, broken_twin
from support.nightly_cases import rest_nightly
from support.workloads.probe_case import POISON, ProbeCase, as_array

pytestmark = pytest.mark.triton

FP16_LOGIT_ERROR = 2.0**-11
"""Relative rounding error of a half-precision logit: a probability is off by at most that times the logit."""


@dataclass
class LogitCase:
    """Decode queries of a ragged batch; its logits are what exact attention would have emitted."""

    lengths: list[int]
    page_size: int = 16
    num_kv_heads: int = 2
    group: int = 4
    num_layers: int = 2
    logit_cap: float = 0.0
    sink_tokens: int = 4
    local_tokens: int = 16
    sharpness: float = 3.0
    dtype: torch.dtype = torch.float32
    base_2: bool = True
    seed: int = 0
    device: str = "cpu"
    largest_logit: float = field(init=False, default=0.0)

    def probe(self) -> ProbeCase:
        shared = {item.name for item in fields(self)} & {item.name for item in fields(ProbeCase)} - {"device"}
        return ProbeCase([(length, 1) for length in self.lengths], **{n: getattr(self, n) for n in shared})

    def reduced(
        self, module: ModuleType = logit_reduction, *, gate: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows by the kernel and by the definition."""
        probe = self.probe()
        requests = len(self.lengths)
        step = module.DecodeLogits(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            group=self.group,
            max_tokens=sum(self.lengths) + 7,
            max_requests=requests + 2,
            max_pages=probe.max_pages + 1,
            dtype=self.dtype,
            device=self.device,
        )
        for buffer in (step.log_sums, step.body, step.body_totals):
            buffer.fill_(POISON)
        step.logits.fill_(6e4)
        # The last request first, and the batch in another order than the observed.
        starts = [sum(self.lengths[request + 1 :]) for request in range(requests)]
        batch_rows = [(request + 1) % (requests + 1) for request in range(requests)]
        for layer in range(self.num_layers):
            for request, table in enumerate(probe.tables):
                q = probe.q[layer][int(probe.queries.first_query_rows[request])]
                q = q.view(self.num_kv_heads, self.group, -1)
                logits = probe.scale * torch.einsum("hgd,khd->hkg", q, probe.k[layer][table])
                if self.logit_cap:
                    logits = self.logit_cap * torch.tanh(logits / self.logit_cap)
                self.largest_logit = max(self.largest_logit, float(logits.abs().max()))
                entries = slice(starts[request], starts[request] + self.lengths[request])
                step.logits[layer, :, entries] = logits.to(self.dtype)
                log_sums = torch.logsumexp(logits, dim=1).flatten()
                step.log_sums[layer, batch_rows[request]] = log_sums / (math.log(2) if self.base_2 else 1.0)
        rows = PageRows.zeros(requests + 2, probe.max_pages + 1, self.device)
        # One row of padding behind the requests, as a captured batch has it.
        numbers = [[*starts, 0], [*self.lengths, 1], [*batch_rows, 0], [*probe.queries.slots.tolist(), -1]]
        tensors = torch.tensor(numbers, dtype=torch.int32, device=self.device)
        module.reduce_logits(
            step,
            module.ObservedLogits(*tensors),
            rows,
            gate=torch.tensor([gate], dtype=torch.int32, device=self.device),
            max_seq_len=max(self.lengths),
            page_size=self.page_size,
            sink_tokens=self.sink_tokens,
            local_tokens=self.local_tokens,
            log_sums_in_base_2=self.base_2,
        )
        return as_array(rows), probe.expected()


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(data=st.data())
def test_rows_are_those_of_the_definition(data: st.DataObject, device: str) -> None:
    draw = data.draw
    case = LogitCase(
        draw(st.lists(st.integers(1, 300), min_size=1, max_size=3)),
        page_size=draw(st.sampled_from([1, 3, 16, 64, 128, 200])),
        num_kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 3, 4, 8])),
        num_layers=draw(st.integers(1, 2)),
        logit_cap=draw(st.sampled_from([0.0, 3.0])),
        sink_tokens=draw(st.sampled_from([0, 4, 17, 250])),
        local_tokens=draw(st.sampled_from([0, 1, 16, 250])),
        sharpness=draw(st.sampled_from([0.1, 1.0, 6.0])),
        base_2=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32)),
        device=device,
    )
    got, expected = case.reduced()
    np.testing.assert_allclose(got, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("sharpness", "page_size"),
    rest_nightly([(15.0, 1), (6.0, 16), (1.0, 1), (1.0, 16), (6.0, 1), (15.0, 16)], daily=2),
)
def test_half_precision_logits_keep_their_bound(sharpness: float, page_size: int, device: str) -> None:
    """Not renormalised: the error of a page's mass is bounded by that of its logits, times the mass."""
    case = LogitCase([300, 77], sharpness=sharpness, page_size=page_size, dtype=torch.float16, device=device)
    got, expected = case.reduced()
    assert case.largest_logit > 2 * sharpness
    bound = math.expm1(case.largest_logit * FP16_LOGIT_ERROR)
    body, peak, mass = np.abs(got - expected)
    assert (mass <= bound * expected[2] + 2e-6).all()
    assert (peak <= bound * expected[1] + 2e-6).all()
    # Numerator and denominator of the body are off by that each.
    assert (body <= 2.1 * bound * expected[0] + 2e-6).all()


def test_a_closed_gate_writes_nothing(device: str) -> None:
    got, _ = LogitCase([40, 9], device=device).reduced(gate=0)
    assert not got.any()


TWINS = [
    Mutation("one_page_off", "token[:, :, None] * GROUP", "(token[:, :, None] + PAGE_SIZE) * GROUP"),
    Mutation("one_head_swapped", "kv_head * GROUP + g", "(NUM_KV_HEADS - 1 - kv_head) * GROUP + g"),
    Mutation("stale_tail", "& (token < seq_len)", "& (token < seq_len + 1)"),
    Mutation("one_layer_lost", "range(NUM_LAYERS)", "range(NUM_LAYERS - 1)"),
    Mutation("natural_base", "math.log(2) if log_sums_in_base_2 else 1.0", "1.0"),
    Mutation("wrong_row", "out = PeakRows + slot * row_stride", "out = PeakRows + 1 + slot * row_stride"),
    Mutation("sinks_in_the_body", "(token >= sink_tokens)", "(token >= 0)"),
    Mutation("first_total_only", "num_totals = tl.cdiv(num_pages, PAGES)", "num_totals = 1"),
    Mutation("next_request", "+ first) * GROUP", ") * GROUP + first"),
    Mutation("order_for_batch_row", "batch_row * (NUM_KV", "request * (NUM_KV"),
]


FIXED = LogitCase([300, 77], page_size=8)


def test_the_fixed_case_passes_unbroken(device: str) -> None:
    got, expected = replace(FIXED, device=device).reduced()
    np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("mutation", TWINS, ids=str)
def test_broken_twins_are_told_apart(mutation: Mutation, device: str, tmp_path: Path) -> None:
    case = replace(FIXED, device=device)
    got, expected = case.reduced(broken_twin(logit_reduction, mutation, tmp_path))
    assert not np.allclose(got, expected, atol=1e-3)
