"""Audits of chosen pages: what they find, and what follows for the budget."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.tiered_options import SparseOptions, TieredOptions
from sgl_importance.sparse.audits import MAX_BUDGET_FACTOR, AuditCounts, AuditRule, AuditTrail, BudgetFactor
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
    torch.testing.assert_close(found.exact.output, exact, atol=tolerance, rtol=tolerance)
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


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 9))
def test_a_factor_doubles_and_halves_and_remembers_every_position(outcomes: list[bool], first: int) -> None:
    factor = BudgetFactor()
    seen = []
    for position, fails in enumerate(outcomes, first):
        seen.append(factor.at(position))
        factor.judge(position, fails=fails)
        assert factor.is_judged(position)
        assert factor.has_failed(position) == fails
    assert [factor.at(position) for position in range(first, first + len(outcomes))] == seen
    seen.append(factor.at(first + len(outcomes)))
    assert seen[0] == 1
    for (before, after), fails in zip(pairwise(seen), outcomes, strict=True):
        assert after == (min(2 * before, MAX_BUDGET_FACTOR) if fails else max(before // 2, 1))


def test_audits_take_place_at_every_nth_generated_token() -> None:
    trail = AuditTrail(AuditRule(3, 1.0), 10, AuditCounts())
    assert [trail.turn(position) for position in range(8, 18)] == [
        None,
        None,
        0,
        None,
        None,
        1,
        None,
        None,
        2,
        None,
    ]
    assert AuditRule(0, 1.0).turn(0) is None


def test_a_failed_audit_is_replaced_and_one_that_is_made_again_counts_once() -> None:
    totals = AuditCounts()
    trail = AuditTrail(AuditRule(1, 0.25), 10, totals)

    def audited(position: int, missed_page: float) -> bool:
        return trail.audited(position, missed_mass=0.75, missed_page=missed_page, output_error=0.5)

    assert not audited(10, 0.25)
    assert audited(11, 0.5)
    assert trail.budget_factor(11) == 1
    assert trail.budget_factor(12) == 2
    # After a retraction, with other numbers: the answer must come out as it did.
    assert audited(11, 0.0)
    assert not audited(10, 1.0)
    assert trail.budget_factor(12) == 2
    assert (
        trail.counts
        == totals
        == AuditCounts(audits=2, failed=1, missed_mass=1.5, missed_page=0.75, output_error=1.0)
    )


@pytest.mark.parametrize("number", ["missed_mass", "missed_page", "output_error"])
def test_what_is_not_finite_stays_in_no_sum(number: str) -> None:
    totals = AuditCounts()
    trail = AuditTrail(AuditRule(1, 0.25), 10, totals)
    found = {"missed_mass": 0.5, "missed_page": 0.5, "output_error": 0.5}
    assert not trail.audited(10, **{**found, number: float("nan")})
    assert trail.counts == totals == AuditCounts()
    assert trail.budget_factor(11) == 1
    assert trail.audited(11, **found)
    assert totals.audits == totals.failed == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sparse.audit_missed_page": 0.5}, "needs audits"),
        ({"sparse.audit_interval": 8}, "to be a selector"),
    ],
)
def test_audits_of_nothing_are_refused(options: dict[str, float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ImportanceOptions.of(options)


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
