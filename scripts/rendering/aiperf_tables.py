"""What stock sglang and ours compute of Mooncake's trace, made of ``benchmark/results/peers_aiperf.json``."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from benchmark.serving.measured import table
from scripts.rendering.figures import results

_STOCK, _OURS = "stock sglang", "ours"
_Arms = dict[str, dict[str, Any]]


def _slices() -> list[_Arms]:
    """Rows by arm of each slice of the trace that both arms have."""
    found: dict[int, _Arms] = defaultdict(dict)
    for row in results("peers_aiperf")["rows"]:
        found[row["seed"]][row["arm"]] = row
    return [arms for _, arms in sorted(found.items()) if {_STOCK, _OURS} <= set(arms)]


def _computed(arms: _Arms) -> float:
    return float(arms[_OURS]["computed_tokens"] / arms[_STOCK]["computed_tokens"])


def aiperf_computed() -> str:
    """Ours over stock's, from the least of the slices to the most."""
    ratios = [_computed(arms) for arms in _slices()]
    return f"{min(ratios):.3f} to {max(ratios):.3f}" if len(ratios) > 1 else f"{ratios[0]:.3f}"


def aiperf_table() -> str:
    """Thousands of tokens, slice by slice."""
    lines = []
    for number, arms in enumerate(_slices(), 1):
        stock = arms[_STOCK]
        sent = [f"{stock[name] / 1e3:,.0f}" for name in ("prompt_tokens", "unique_tokens", "pool")]
        computed = [f"{arms[arm]['computed_tokens'] / 1e3:,.0f}" for arm in (_STOCK, _OURS)]
        requests = f"{stock['request_count']:,.0f}"
        lines.append([str(number), requests, *sent, *computed, f"{_computed(arms):.3f}"])
    header = ["slice", "requests", "prompts", "unique", "pool", "stock sglang", "ours", "ours / stock sglang"]
    return table(header, lines)
