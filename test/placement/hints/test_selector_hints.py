"""The report says what became of hints about the pages that a step reads."""

from __future__ import annotations

import pytest

from sgl_importance.placement.hints.hinted_request import HintedRequest
from sgl_importance.placement.hints.hints import BadHint, Hints


@pytest.mark.parametrize("has_selector", [True, False])
def test_a_budget_needs_a_selector_and_all_pages_need_none(has_selector: bool) -> None:
    def outcome(hint: dict[str, object]) -> dict[str, dict[str, object]]:
        hinted = HintedRequest(
            Hints.parse(hint),
            prompt_tokens=8,
            cached_tokens=0,
            clock=0,
            observe=False,
            has_selector=has_selector,
        )
        return hinted.outcome

    assert outcome({"selector": "all"}) == {"selector": {"applied": True}}
    budget = outcome({"budget": 0.5})["budget"]
    assert budget["applied"] is has_selector
    assert ("no selector" in str(budget.get("reason", ""))) is not has_selector


def test_all_pages_have_no_budget() -> None:
    with pytest.raises(BadHint, match="'all' has no budget"):
        Hints.parse({"selector": "all", "budget": 0.5})
