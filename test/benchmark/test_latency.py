"""What tokens wait is compared with the best independent choice of pages in the same round."""

from __future__ import annotations

from typing import Any

from benchmark.sparse.latency import QUANTILES, compare


def row(arm: str, bias: float, number: int, ms: float, what: str = "decode") -> dict[str, Any]:
    return {
        "context": 8192,
        "throttled": True,
        "what": what,
        "arm": arm,
        "bias": bias,
        "round": number,
        "mean_ms": ms,
        **{f"{name}_ms": ms * at for at, name in enumerate(QUANTILES, 1)},
    }


def test_ratios_are_to_the_best_that_has_no_bias_within_a_round() -> None:
    rows = [
        row("lru", 0, 0, 10),
        row("ema", 0, 0, 12),
        row("ema, bias 1", 1, 0, 5),
        row("lru", 0, 1, 40),  # slower in this round than the other, but faster over both
        row("ema", 0, 1, 36),
        row("ema, bias 1", 1, 1, 30),
        row("ema", 0, 0, 7, "questions"),
        row("ema, bias 1", 1, 0, 14, "questions"),
    ]
    rows[4]["mean_ms"] = 39
    compare(rows)
    assert [each["best"] for each in rows] == ["lru"] * 6 + ["ema"] * 2
    expected = [1, 1.2, 0.5, 1, 0.9, 0.75, 1, 2]
    for name in QUANTILES:
        assert [each[f"{name}_ratio"] for each in rows] == expected
