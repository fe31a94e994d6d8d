"""What a trained model takes on a CPU, made of ``benchmark/results``."""

from __future__ import annotations

from statistics import median

from scripts.rendering.figures import results


def _median(what: str, number: str, tokens: int | None = None) -> float:
    rows = [row for row in results("real_model_times")["rows"] if row["what"] == what]
    return median(row[number] for row in rows if tokens in (None, row["tokens"]))


def second_turn() -> str:
    """Seconds to the first token of a conversation's second turn: from the cache, and without one."""
    cached, cold = (_median("second turn", number) for number in ("cached_s", "cold_s"))
    return f"{cached:.1f} s instead of {cold:.1f}"


def second_turn_cached() -> str:
    """How much of that turn's prompt came from the cache."""
    cached, tokens = (_median("second turn", number) for number in ("cached_tokens", "tokens"))
    return f"{cached:,.0f} of {tokens:,.0f} tokens"
