"""Differences, McNemar's test and verdicts, beside sums done by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance_lab.bench.bench_run import Asked, BenchError, Part, Run, Sample
from sgl_importance_lab.bench.paired import NO_VERDICT, mcnemar, paired
from sgl_importance_lab.bench.quality_plot import budget_share

COUNTS = st.integers(0, 60)


def run(scores: list[float], *, length: int = 1024, prompts: str = "p", **fields: object) -> Run:
    asked = Asked("ruler", ["ruler_vt"], [length], len(scores), None, False, "lm_eval==0")
    samples = [
        Sample("ruler_vt", number, f"{prompts}{number}", score, str(score))
        for number, score in enumerate(scores)
    ]
    values: dict[str, object] = {"selector": None, "budget": None, **fields}
    return Run(asked, "http://a", "m", "", {}, parts=[Part(length, 1, 0, 1.0, samples)], **values)  # type: ignore[arg-type]  # fields by name


@pytest.mark.parametrize(
    ("lost", "won", "p"), [(5, 0, 2 / 32), (0, 6, 2 / 64), (2, 8, 112 / 1024), (3, 3, 1)]
)
def test_mcnemar_by_hand(lost: int, won: int, p: float) -> None:
    assert mcnemar(lost, won) == pytest.approx(p)


@given(COUNTS, COUNTS)
def test_mcnemar_is_a_chance_and_takes_no_side(lost: int, won: int) -> None:
    assert 0 < mcnemar(lost, won) <= 1
    assert mcnemar(lost, won) == mcnemar(won, lost)
    assert mcnemar(lost + 1, 0) < mcnemar(lost, 0) or lost == 0


def test_a_worse_run_is_called_worse_and_the_other_way_round_better() -> None:
    whole, sparse = run([1.0] * 10), run([0.2] * 7 + [1.0] * 3)
    (found,) = paired(whole, sparse)
    assert (found.lost, found.won, found.n) == (7, 0, 10)
    assert found.difference.value == pytest.approx(-0.56)
    assert found.difference.low < -0.56 < found.difference.high < 0
    assert found.equal == 0.3
    assert found.verdict == "worse"
    (back,) = paired(sparse, run([1.0] * 10))
    assert back.verdict == NO_VERDICT


def test_few_differences_show_nothing() -> None:
    (found,) = paired(run([1.0] * 8), run([1.0] * 7 + [0.0]))
    assert found.verdict == "not told apart"


def test_only_the_same_prompts_are_paired() -> None:
    with pytest.raises(BenchError, match="the prompts of both runs differ: repeat them with one --tokenizer"):
        paired(run([1.0] * 4), run([1.0] * 4, prompts="q"))
    with pytest.raises(BenchError, match="were not asked the same"):
        paired(run([1.0] * 4), run([1.0] * 5))


@pytest.mark.parametrize(("budget", "share"), [(None, 1), (0.1, 0.1), (256, 0.25), (4096, 1)])
def test_a_budget_is_a_share_of_the_context(budget: float | None, share: float) -> None:
    assert budget_share(run([1.0], selector="bits", budget=budget), 1024) == share
