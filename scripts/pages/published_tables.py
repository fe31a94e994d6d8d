"""Tables of every policy on traffic that nothing was chosen on, and of what was saved there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.serving.measured import table as _table
from scripts.pages.cells import share as _share
from scripts.pages.figures import results

_Row = Mapping[str, Any]
_OURS, _OPTIMUM = "importance", "belady"
_BEFORE = ("lru", "fifo", "random", "lfu", "slru", "tlru", "mq", "s3fifo", "arc", "gdsf", "lhd")
"""Of ``benchmark/policy.py``."""
_SIZES = (0.01, 0.02, 0.05, 0.1, 0.2)
_HELD_OUT = {
    "mooncake": "Mooncake, an hour",
    "miniswe": "miniswe, random turns",
    "taubench": "taubench, random turns",
    "agents": "coding agents, 20 alive",
}
_SHAPES = {
    "mooncake": ("conversations (Mooncake, an hour)", _SIZES),
    "agents": ("coding agents, 20 sessions alive", (0.01, 0.02, 0.04, 0.08)),
    "taubench": ("one long instruction shared by short sessions (taubench)", _SIZES),
}


def _rows(trace: str) -> list[_Row]:
    return [each for each in results("published")["rows"] if each["trace"] == trace]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _by_policy(trace: str) -> dict[str, list[_Row]]:
    """Rows of the policies that were replayed at every size, in the orders that all of them have."""
    found: dict[str, list[_Row]] = {}
    for each in _rows(trace):
        found.setdefault(each["policy"], []).append(each)
    sizes = max(len(rows) for rows in found.values())
    found = {policy: rows for policy, rows in found.items() if len(rows) == sizes}
    orders = min(len(each["hit_rates"]) for rows in found.values() for each in rows)
    return {policy: [_first(each, orders) for each in rows] for policy, rows in found.items()}


def _first(each: _Row, orders: int) -> _Row:
    return {name: value[:orders] if isinstance(value, list) else value for name, value in each.items()}


def orders_of(trace: str) -> int:
    """Orders of sessions in which all policies of ``policies_on`` were replayed."""
    return len(_by_policy(trace)["lru"][0]["hit_rates"])


def policies_on(trace: str) -> str:
    """Every policy's hit rates on one trace, best first; the mean of its orders."""
    by_policy = _by_policy(trace)
    order = sorted(by_policy, key=lambda policy: -sum(_mean(each["hit_rates"]) for each in by_policy[policy]))
    lines = []
    for policy in order:
        rates = [_share(_mean(each["hit_rates"])) for each in by_policy[policy]]
        name = f"**`{policy}`**" if policy == _OURS else f"`{policy}`"
        lines.append(["optimum" if policy == _OPTIMUM else name, *rates])
    return _table(["policy", *(f"{each['capacity']:.0%}" for each in by_policy["lru"])], lines)


def _rivals(trace: str) -> dict[tuple[str, float], float]:
    """Hit rates of every published policy by capacity, in the first order of a trace, of both benchmarks."""
    found = {
        (each["policy"], each["capacity"]): each["hit_rates"][0]
        for each in _rows(trace)
        if each["policy"] not in (_OURS, _OPTIMUM)
    }
    for each in results("policy")["rows"]:
        if each["policy"] in _BEFORE and each["trace"] in (trace, f"{trace}, order 0"):
            found |= {(each["policy"], size): each[f"{size:.0%}"] for size in _SIZES}
    return found


def held_out() -> str:
    """What ours hits beside the best published policy of each size, in the first order of each trace."""
    lines = []
    for trace, shown in _HELD_OUT.items():
        known, cells = _rivals(trace), []
        for own in (each for each in _rows(trace) if each["policy"] == _OURS):
            rates = {policy: rate for (policy, size), rate in known.items() if size == own["capacity"]}
            best = max(rates, key=lambda policy: rates[policy])
            cells.append(f"{own['capacity']:.0%}: {own['hit_rates'][0] - rates[best]:+.3f} (`{best}`)")
        rivals = {policy for policy, _ in known}
        lines.append([shown, str(len(rivals)), *cells, *[""] * (5 - len(cells))])
    return _table(["traffic", "published policies", "beside the best of them", "", "", "", ""], lines)


def _savings(trace: str) -> list[tuple[_Row, float, float, float]]:
    """By size: LRU's row, hit rates of tokens (LRU's, ours), and how much larger LRU would have to be."""
    _, sizes = _SHAPES[trace]
    by_policy = _by_policy(trace)
    found = []
    for lru, ours in zip(by_policy["lru"], by_policy[_OURS], strict=True):
        if ours["capacity"] in sizes:
            needs = [
                blocks / pool
                for blocks, pool in zip(ours["lru_blocks"], ours["capacity_blocks"], strict=True)
                if blocks is not None
            ]
            found.append((lru, *(_mean(each["token_hit_rates"]) for each in (lru, ours)), _mean(needs)))
    return found


def saved() -> str:
    """What ours saved beside LRU on three shapes of traffic: computed tokens, and memory."""
    lines = []
    for trace, (shown, sizes) in _SHAPES.items():
        for row, lru, ours, needs in _savings(trace):
            lines.append(
                [
                    shown if row["capacity"] == sizes[0] else "",
                    f"{row['capacity']:.0%}",
                    f"{lru:.1%}",
                    f"{ours:.1%}",
                    f"{(1 - ours) / (1 - lru) - 1:+.1%}",
                    f"{needs:.2f}x",
                ]
            )
    titles = ["traffic", "pool", "tokens that LRU hits", "`importance`", "computed tokens", "LRU needs"]
    return _table(titles, lines)


def saved_in_short(trace: str) -> str:
    """The ranges of one traffic in `saved`, over its sizes of the pool."""
    found = _savings(trace)
    fewer = sorted(100 * (1 - (1 - ours) / (1 - lru)) for _, lru, ours, _ in found)
    needs = sorted(each for *_, each in found)
    return f"{fewer[0]:.1f} to {fewer[-1]:.1f} % fewer, {needs[0]:.2f} to {needs[-1]:.2f} times"
