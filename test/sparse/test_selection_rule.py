"""Which tokens select depends on positions only."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.tiered_options import SparseOptions, TieredOptions
from sgl_importance.sparse.selection_rule import SelectionRule, TokenSpan, read_all, selection_rule

PAGE = 4
rules = st.builds(
    selection_rule,
    prompt_tokens=st.integers(1, 60),
    selecting_prompt_tokens=st.integers(0, 40),
    min_context_tokens=st.integers(0, 50),
    budget=st.just(0.5),
    page_size=st.just(PAGE),
)


def by_token(rule: SelectionRule, cuts: list[int]) -> list[tuple[bool, bool, int]]:
    """What each token does: whether it selects, is generated, and where its span begins if it selects."""
    found = []
    for start, stop in pairwise(cuts):
        spans = list(rule.spans(start, stop))
        assert [each.start for each in spans] + [stop] == [start] + [each.stop for each in spans]
        for span in spans:
            found += [(span.selects, span.is_generated, span.start if span.selects else -1)] * (
                span.stop - span.start
            )
    return found


@given(rule=rules, total=st.integers(1, 90), pages=st.sets(st.integers(1, 20)))
def test_chunks_and_cached_prefixes_change_nothing(rule: SelectionRule, total: int, pages: set[int]) -> None:
    """A prefill begins and is cut at the ends of pages."""
    cuts = [0, *sorted(PAGE * page for page in pages if PAGE * page < total), total]
    assert by_token(rule, cuts) == by_token(rule, [0, total])


@given(rule=rules, total=st.integers(61, 90))
def test_a_retracted_answer_is_computed_again_as_it_was(rule: SelectionRule, total: int) -> None:
    generated = rule.prompt_tokens
    steps = [*range(max(generated, rule.first), total + 1)]
    if len(steps) > 1:
        assert by_token(rule, steps) == by_token(rule, [steps[0], total])


def test_spans_of_a_prompt_end_with_their_page_and_generated_tokens_stand_alone() -> None:
    rule = selection_rule(
        prompt_tokens=11, selecting_prompt_tokens=5, min_context_tokens=0, budget=8, page_size=PAGE
    )
    assert list(rule.spans(0, 13)) == [
        TokenSpan(0, 4, selects=False),
        TokenSpan(4, 8, selects=True),
        TokenSpan(8, 11, selects=True),
        TokenSpan(11, 12, selects=True, is_generated=True),
        TokenSpan(12, 13, selects=True, is_generated=True),
    ]
    assert [span.selects for span in read_all(PAGE).spans(0, 13)] == [False]


@pytest.mark.parametrize(
    ("budget", "context", "pages"), [(8, 100, 2), (9, 100, 3), (0.1, 100, 3), (0.1, 39, 1)]
)
def test_a_budget_is_whole_pages(budget: float, context: int, pages: int) -> None:
    rule = SelectionRule(prompt_tokens=1, first=1, budget=budget, page_size=PAGE)
    assert rule.max_pages(context) == pages


def test_a_selector_needs_tiered_pages() -> None:
    with pytest.raises(ValueError, match="'bits' needs --kv-residency to be 'tiered'"):
        ImportanceOptions(policy="importance", sparse=SparseOptions(selector="bits"))
    assert ImportanceOptions(
        policy="importance", tiered=TieredOptions(residency="tiered"), sparse=SparseOptions(selector="bits")
    ).is_sparse
