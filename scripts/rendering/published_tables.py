"""Tables of every published policy beside ours, and of what ours saved on the same traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from benchmark.serving.measured import table as _table
from scripts.rendering.cells import share as _share
from scripts.rendering.figures import results

_Row = Mapping[str, Any]
_OURS, _OPTIMUM = "importance", "belady"
_SIZES = (0.01, 0.02, 0.05, 0.1, 0.2)
_GOAL = 0.003
"""How far below the best published policy ours was to be at most."""
_TRAFFIC = {
    "mooncake": "Mooncake, an hour (tuned on)",
    "miniswe": "miniswe, random turns",
    "taubench": "taubench, random turns",
    "agents": "coding agents, 20 alive",
    "agents untold": "the same, ends not told",
}
_SHAPES = {
    "mooncake": ("conversations (Mooncake, an hour)", _SIZES),
    "agents": ("coding agents, 20 sessions alive", (0.01, 0.02, 0.04, 0.08)),
    "agents untold": ("the same, where nobody tells how answers end", (0.01, 0.02, 0.04, 0.08)),
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


class _Beside(NamedTuple):
    """Ours at one size of the cache: hit rates above another's, by order of sessions."""

    capacity: float
    best: str
    """The published policy with the highest mean."""
    above_best: float
    """Of the means, ours above its."""
    above_best_of_order: list[float]
    """Ours above the best of each order."""
    above_lru: list[float]


@cache
def _beside(trace: str) -> list[_Beside]:
    """By size, in the orders in which all policies were replayed."""
    found = []
    for own in (each for each in _rows(trace) if each["policy"] == _OURS):
        others = {
            each["policy"]: each["hit_rates"]
            for each in _rows(trace)
            if each["capacity"] == own["capacity"] and each["policy"] not in (_OURS, _OPTIMUM)
        }
        orders = min(len(own["hit_rates"]), *map(len, others.values()))
        ours = own["hit_rates"][:orders]
        others = {policy: rates[:orders] for policy, rates in others.items()}
        best = max(others, key=lambda policy: _mean(others[policy]))
        best_of_order = [max(rates) for rates in zip(*others.values(), strict=True)]
        found.append(
            _Beside(
                own["capacity"],
                best,
                _mean(ours) - _mean(others[best]),
                [mine - theirs for mine, theirs in zip(ours, best_of_order, strict=True)],
                [mine - theirs for mine, theirs in zip(ours, others["lru"], strict=True)],
            )
        )
    return found


def _mean_and_worst(mean: float, by_order: Sequence[float]) -> str:
    return f"{mean:+.3f}" + (f", worst {min(by_order):+.3f}" if len(by_order) > 1 else "")


def _orders(trace: str) -> str:
    orders = sorted({len(each.above_lru) for each in _beside(trace)})
    return " or ".join(map(str, orders))


def beside_published() -> str:
    """What ours hits beside the best published policy of each size: of mean and worst order."""
    lines = []
    for trace, shown in _TRAFFIC.items():
        cells = []
        for each in _beside(trace):
            above = _mean_and_worst(each.above_best, each.above_best_of_order)
            cells.append(f"{each.capacity:.0%}: {above} (`{each.best}`)")
        rivals = {each["policy"] for each in _rows(trace)} - {_OURS, _OPTIMUM}
        lines.append([shown, _orders(trace), str(len(rivals)), *cells, *[""] * (5 - len(cells))])
    return _table(
        ["traffic", "orders", "published policies", "beside the best of them", "", "", "", ""], lines
    )


def beside_lru() -> str:
    """The same beside LRU alone."""
    lines = []
    for trace, shown in _TRAFFIC.items():
        cells = [
            f"{each.capacity:.0%}: {_mean_and_worst(_mean(each.above_lru), each.above_lru)}"
            for each in _beside(trace)
        ]
        lines.append([shown, *cells, *[""] * (5 - len(cells))])
    return _table(["traffic", "beside LRU", "", "", "", ""], lines)


def below_published(trace: str) -> tuple[float, float]:
    """The most that ours hits below the best published policy of a size: of the means, and in one order."""
    found = _beside(trace)
    return -min(each.above_best for each in found), -min(min(each.above_best_of_order) for each in found)


def goal_met(trace: str) -> str:
    """Sizes at which ours is no more than the goal below the best published policy, of the means."""
    met = [f"{each.capacity:.0%}" for each in _beside(trace) if each.above_best >= -_GOAL]
    return " and ".join(met) or "no size"


def below_lru(trace: str) -> str:
    """Sizes at which ours hits less than LRU: of the means, and in one order at least."""
    found = _beside(trace)
    of_means = [f"{each.capacity:.0%}" for each in found if _mean(each.above_lru) < 0]
    in_one = [f"{each.capacity:.0%}" for each in found if min(each.above_lru) < 0]

    def listed(sizes: Sequence[str]) -> str:
        if len(sizes) == len(found):
            return "all sizes"
        return ", ".join(sizes) if sizes else "no size"

    return f"at {listed(of_means)} in the mean, at {listed(in_one)} in one order or more"


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
