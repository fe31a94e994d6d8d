"""Tables of short sessions that take turns by chance: what of a difference is noise, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.intervals import interval as _interval
from benchmark.serving.measured import table as _table
from scripts.rendering.figures import results

_TRAFFIC = ("miniswe", "taubench")
_OURS, _LRU, _OPTIMUM = "importance", "lru", "belady"
_ABLATIONS = {
    "classes alone": "ours by classes of nodes alone, no turns",
    "second hour": "the same behind the same traffic with other blocks: all is learnt that can be",
    "told who returns": "the same, told of each block whether it will ever return",
}


def _rates(trace: str) -> dict[float, dict[str, list[float]]]:
    """Hit rates by order, of each policy, by size of the cache."""
    found: dict[float, dict[str, list[float]]] = {}
    for each in results("published")["rows"]:
        if each["trace"] == trace:
            found.setdefault(each["capacity"], {})[each["policy"]] = each["hit_rates"]
    return found


def _chosen_elsewhere(rates: Mapping[str, Sequence[float]]) -> list[str]:
    """For each order the published policy that is the best in the others together."""
    rivals = [policy for policy in rates if policy not in (_OURS, _OPTIMUM)]
    orders = range(len(rates[_OURS]))
    return [max(rivals, key=lambda policy: sum(rates[policy]) - rates[policy][order]) for order in orders]


def _of_best(rates: Mapping[str, Sequence[float]]) -> list[float]:
    return [rates[policy][order] for order, policy in enumerate(_chosen_elsewhere(rates))]


def random_turns_orders() -> int:
    """Orders of sessions that every policy was replayed in."""
    (orders,) = {
        len(rates) for trace in _TRAFFIC for cell in _rates(trace).values() for rates in cell.values()
    }
    return int(orders)


def beside_chosen_elsewhere() -> str:
    """Ours beside the published policy that is the best in all other orders, with 95 % intervals."""
    lines = []
    for trace in _TRAFFIC:
        cells = []
        for size, rates in _rates(trace).items():
            beside = [mine - best for mine, best in zip(rates[_OURS], _of_best(rates), strict=True)]
            mean, low, high = _interval(beside)
            chosen = ", ".join(f"`{policy}`" for policy in dict.fromkeys(_chosen_elsewhere(rates)))
            cells.append(f"{size:.0%}: {mean:+.3f} ({low:+.3f} to {high:+.3f}; {chosen})")
        lines.append([trace, *cells])
    return _table(["traffic", "beside the best of the other orders", "", "", "", ""], lines)


def random_turns_told_apart(trace: str) -> str:
    """The sizes at which ours is below that policy by more than chance explains."""
    below = []
    for size, rates in _rates(trace).items():
        beside = [mine - best for mine, best in zip(rates[_OURS], _of_best(rates), strict=True)]
        if _interval(beside)[2] < 0:
            below.append(f"{size:.0%}")
    return ", ".join(below) or "no size"


def _closed(trace: str, chosen: Mapping[float, Sequence[float]]) -> list[float]:
    """Part of the gap from LRU to the optimum by order, mean over the sizes."""
    by_size = _rates(trace)
    parts = [
        [
            (rate - lru) / (optimum - lru)
            for rate, lru, optimum in zip(
                chosen[size], by_size[size][_LRU], by_size[size][_OPTIMUM], strict=True
            )
        ]
        for size in by_size
    ]
    return [sum(of_order) / len(of_order) for of_order in zip(*parts, strict=True)]


def random_turns_ablation() -> str:
    """Part of the gap that ours closes, the best published policies, and ours where it is told more."""

    def cell(values: Sequence[float]) -> str:
        mean, low, high = _interval(values)
        return f"{mean:.2f} ({low:.2f} to {high:.2f})"

    ours = {trace: {size: cell[_OURS] for size, cell in _rates(trace).items()} for trace in _TRAFFIC}
    best = {trace: {size: _of_best(cell) for size, cell in _rates(trace).items()} for trace in _TRAFFIC}
    lines = [
        ["**`importance`**", *(cell(_closed(trace, ours[trace])) for trace in _TRAFFIC)],
        [
            "the best published of the other orders",
            *(cell(_closed(trace, best[trace])) for trace in _TRAFFIC),
        ],
    ]
    for policy, shown in _ABLATIONS.items():
        lines.append([shown, *(cell(_of_policy(policy, trace)) for trace in _TRAFFIC)])
    return _table(["part of the gap, mean of the sizes", *_TRAFFIC], lines)


def _of_policy(policy: str, trace: str) -> list[float]:
    """The same of an arm of ``benchmark/policy.py``, in its orders."""
    rows: list[Mapping[str, Any]] = results("policy")["rows"]
    return [
        float(each["gap_closed"])
        for each in rows
        if each["policy"] == policy and each["trace"].startswith(f"{trace}, order ")
    ]
