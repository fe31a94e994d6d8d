"""Ours beside published policies: of all orders that were replayed, not of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmark import halves
from scripts.pages import published_tables
from scripts.pages.figures import results

RATES = {
    "lru": [0.30, 0.52, 0.40],
    "arc": [0.35, 0.40, 0.30],
    "mq": [0.20, 0.30, 0.52],
    "importance": [0.34, 0.49, 0.40, 0.9],
    "belady": [0.9, 0.9, 0.9],
}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three orders, and a fourth that only ours was replayed in."""
    rows = [
        {"trace": "miniswe", "capacity": 0.01, "policy": policy, "hit_rates": rates}
        for policy, rates in RATES.items()
    ]
    published_tables._beside.cache_clear()
    monkeypatch.setattr(published_tables, "results", lambda name: {"published": {"rows": rows}}[name])
    yield
    published_tables._beside.cache_clear()


@pytest.mark.usefixtures("made_up")
def test_mean_and_worst_are_of_all_orders() -> None:
    """LRU has the best mean, .4067 beside our .41; the best of each order are .35, .52 and .52."""
    cell = "1%: +0.003, worst -0.120 (`lru`)"
    assert f"| miniswe, random turns | 3 | 3 | {cell} |" in published_tables.beside_published()
    assert published_tables.below_published("miniswe") == pytest.approx((-0.01 / 3, 0.12))
    assert published_tables.goal_met("miniswe") == "1%"
    assert "| miniswe, random turns | 1%: +0.003, worst -0.030 |" in published_tables.beside_lru()
    said = "at no size in the mean, at all sizes in one order or more"
    assert published_tables.below_lru("miniswe") == said


def test_short_sessions_were_replayed_in_every_order_by_every_policy() -> None:
    for trace in ("miniswe", "taubench"):
        rows = [each for each in results("published")["rows"] if each["trace"] == trace]
        assert {len(each["hit_rates"]) for each in rows} == {3}
        assert len({(each["policy"], each["capacity"]) for each in rows}) == len(rows) == 24 * 5


def test_windows_of_a_trace_overlap() -> None:
    """Counted one by one on a short trace."""
    windows = [set(range(start, start + 20)) for start in halves.starts(40)]
    pairs = [(one, other) for i, one in enumerate(windows) for other in windows[:i]]
    shared = sum(len(one & other) for one, other in pairs) / (20 * len(pairs))
    assert halves.shared_by_pairs(40) == pytest.approx(shared)
    tuned = [len(window & set(range(20))) / 20 for window in windows]
    assert halves.shared_with_first_half(40) == pytest.approx((min(tuned), max(tuned)))
    named = {each["trace"] for each in results("policy")["rows"] if each["trace"].startswith("random half")}
    assert len(named) == len(windows)
