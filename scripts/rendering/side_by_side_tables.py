"""Seconds of ours over a peer's, request for request, of ``benchmark/results/peers_side_by_side.json``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from benchmark.intervals import interval
from benchmark.serving.measured import table
from scripts.rendering.figures import results

_Row = Mapping[str, Any]
_STOCK, _OURS = "stock sglang", "ours"
_BESIDE_STOCK = {
    _OURS: (_STOCK, ""),
    "ours (told)": (_STOCK, ", told which sessions are over"),
    "ours + HiCache (told)": ("stock + HiCache", ", told, with a host tier on both sides"),
}
"""Which of stock's servers each of ours stood beside, and how that is told."""


def _same_computed(value: str) -> Callable[[_Row, _Row], float]:
    """Of the requests of which both computed as many tokens: what the policy itself costs."""

    def ratio(own: _Row, peer: _Row) -> float:
        same = [
            number
            for number, (one, other) in enumerate(zip(own["computed"], peer["computed"], strict=True))
            if one == other
        ]
        return sum(own[value][number] for number in same) / sum(peer[value][number] for number in same)

    return ratio


def _sum(value: str) -> Callable[[_Row, _Row], float]:
    return lambda own, peer: sum(own[value]) / sum(peer[value])


_RATIOS = {
    "computed": _sum("computed"),
    "first token": _sum("first_token"),
    "whole answer": _sum("answered"),
    "first token where both computed as much": _same_computed("first_token"),
    "CPU time": lambda own, peer: own["cpu_seconds"] / peer["cpu_seconds"],
    "memory": lambda own, peer: own["memory_bytes"] / peer["memory_bytes"],
}


def _pairs(peer: str, own: str = _OURS) -> dict[tuple[str, float], dict[int, tuple[_Row, _Row]]]:
    """Ours and the peer's that stood beside it, by workload and size of the pool, by seed."""
    found: dict[tuple[str, float], dict[int, dict[str, _Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in results("peers_side_by_side")["rows"]:
        if {own, peer} <= set(row["beside"]):
            found[row["workload"], row["share"]][row["seed"]][row["arm"]] = row
    return {
        key: {seed: (arms[own], arms[peer]) for seed, arms in by_seed.items()}
        for key, by_seed in found.items()
    }


def _cell(pairs: Mapping[int, tuple[_Row, _Row]], what: str, form: str = ".2f") -> str:
    mean, low, high = interval([_RATIOS[what](own, peer) for own, peer in pairs.values()])
    return f"{mean:{form}} ({low:{form}} to {high:{form}})" if len(pairs) > 1 else f"{mean:{form}}"


def side_by_side(workload: str, what: str, share: float = 0.25, peer: str = _STOCK, own: str = _OURS) -> str:
    """Ours over a peer's: mean of the seeds with its 95 % interval.

    Args:
        what: a column of the table.
    """
    return _cell(_pairs(peer, own)[workload, share], what)


def side_by_side_table() -> str:
    """Ours over stock's of the same tiers, told which sessions are over or not."""
    lines = []
    for own, (peer, how) in _BESIDE_STOCK.items():
        for (workload, share), pairs in _pairs(peer, own).items():
            requests = sum(row["requests"] for row, _ in pairs.values())
            room = "everything fits" if share > 1 else "a quarter fits"
            cells = [_cell(pairs, what) for what in _RATIOS]
            lines.append([f"{workload}, {room}{how}", str(len(pairs)), f"{requests:,}", *cells])
    return table(["workload", "seeds", "requests", *_RATIOS], lines)


def side_by_side_same_texts() -> str:
    """Of the requests, how many got the same text from ours and stock's."""
    own = [own for pairs in _pairs(_STOCK).values() for own, _ in pairs.values()]
    return f"{sum(row['same_text'] for row in own):,} of {sum(row['requests'] for row in own):,}"


_REPORTED = {
    "computed": "prompt tokens computed",
    "mean_ttft_ms": "first token, mean",
    "median_ttft_ms": "p50",
    "p99_ttft_ms": "p99",
    "total_throughput": "throughput",
}


def bench_serving(value: str) -> str:
    """Ours over stock's under the load of ``sglang.bench_serving``: mean of the seeds with its interval.

    Args:
        value: a key of ``_REPORTED``.
    """
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for row in results("peers_bench_serving")["rows"]:
        reported = row | {"computed": row["total_prompt_tokens"] - row["total_cached_tokens"]}
        found[row["seed"]][row["arm"]] = reported[value]
    mean, low, high = interval([arms[_OURS] / arms[_STOCK] for arms in found.values()])
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"


def bench_serving_table() -> str:
    rows = results("peers_bench_serving")["rows"]
    seeds = {row["seed"] for row in rows}
    requests = sum(row["completed"] for row in rows if row["arm"] == _OURS)
    cells = [bench_serving(value) for value in _REPORTED]
    return table(["seeds", "requests", *_REPORTED.values()], [[str(len(seeds)), str(requests), *cells]])
