"""Audits of chosen pages: when they are made, and what they find."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.tiered_options import SparseOptions, TieredOptions
from sgl_importance.sparse.audits import AuditCounts, AuditTrail
from sgl_importance_kernels.sparse.audit import audit
from sgl_importance_kernels.sparse.streamed_attention import PartialAttention, stream_attention
from sglang_importance.sparse.selections import Selections

from support.paged_context import DIM, KV_HEADS, PAGE, SCALE, dense, filled_slots

TOKENS = 22


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@given(read=st.sets(st.integers(1, 5)), seed=st.integers(0, 99))
def test_an_audit_finds_what_was_missed(
    dtype: torch.dtype, tolerance: float, read: set[int], seed: int
) -> None:
    torch.manual_seed(seed)
    slots = filled_slots(3, TOKENS, dtype)
    queries = torch.randn(1, 3 * KV_HEADS, DIM).to(dtype)
    pages = torch.arange(1, 7)
    chosen = torch.tensor([*sorted(read), 6])  # the last page, which is being filled, is always read
    sums = PartialAttention()
    num_read = TOKENS - (len(pages) - len(chosen)) * PAGE
    stream_attention(sums, queries, slots, 0, chosen, num_read, SCALE, is_chosen=True)
    before = (slots.traffic.read, slots.resident_pages().tolist())

    found = audit(sums, chosen, queries, slots, 0, pages, TOKENS, SCALE)

    assert (slots.traffic.read, slots.resident_pages().tolist()) == before
    exact = dense(queries, slots, TOKENS).float()
    keys = slots.host[0][0].flatten(0, 1)[PAGE : PAGE + TOKENS].float()
    logits = torch.einsum("hgd,nhd->hgn", queries.float().view(KV_HEADS, 3, DIM), keys) * SCALE
    is_read = torch.isin(pages, chosen).repeat_interleave(PAGE)[:TOKENS]
    shares = logits.softmax(dim=-1)
    missed = shares[..., ~is_read].sum(dim=-1).mean()
    assert found.missed_mass == pytest.approx(float(missed), abs=tolerance)
    left_out = [page for page in range(1, 6) if page not in read]
    of_pages = [shares[..., PAGE * page - PAGE : PAGE * page].sum(dim=-1).max() for page in left_out]
    assert found.missed_page == pytest.approx(float(max(of_pages, default=0.0)), abs=tolerance)
    error = (sums.output - exact).norm() / exact.norm()
    assert found.output_error == pytest.approx(float(error), abs=2 * tolerance)


def test_audits_take_place_at_every_nth_generated_token() -> None:
    trail = AuditTrail(3, 10, AuditCounts())
    turns = {position: trail.turn(position) for position in range(8, 18)}
    assert {position: turn for position, turn in turns.items() if turn is not None} == {10: 0, 13: 1, 16: 2}
    assert AuditTrail(0, 10, AuditCounts()).turn(10) is None


def test_an_audit_that_is_made_again_counts_once() -> None:
    totals = AuditCounts()
    trail = AuditTrail(1, 10, totals)
    for position, missed_page in ((10, 0.25), (11, 0.5), (11, 0.0), (10, 1.0)):  # retracted behind the second
        trail.audited(position, missed_mass=0.75, missed_page=missed_page, output_error=0.5)
    assert (
        trail.counts == totals == AuditCounts(audits=2, missed_mass=1.5, missed_page=0.75, output_error=1.0)
    )


@pytest.mark.parametrize("number", ["missed_mass", "missed_page", "output_error"])
def test_what_is_not_finite_stays_in_no_sum(number: str) -> None:
    totals = AuditCounts()
    trail = AuditTrail(1, 10, totals)
    found = {"missed_mass": 0.5, "missed_page": 0.5, "output_error": 0.5}
    trail.audited(10, **{**found, number: float("nan")})
    assert trail.counts == totals == AuditCounts()
    trail.audited(11, **found)
    assert totals.audits == 1


def test_audits_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="to be a selector"):
        ImportanceOptions.of({"sparse.audit_interval": 8})


@pytest.mark.parametrize("selecting_prompt_tokens", [0, 16])
def test_audits_are_counted_from_the_first_generated_token(selecting_prompt_tokens: int) -> None:
    """Also where tokens of the prompt select before it."""
    options = ImportanceOptions(
        policy="importance",
        tiered=TieredOptions(residency="tiered"),
        sparse=SparseOptions(
            selector="bits", prompt_tokens=selecting_prompt_tokens, min_context=0, audit_interval=7
        ),
    )
    req = SimpleNamespace(rid="a", origin_input_ids=[0] * 80)
    selection = Selections(options, PAGE).open(req, reads_all=False, budget=None)
    audited = [position for position in range(60, 100) if selection.trail.turn(position) is not None]
    assert audited == [80, 87, 94]
