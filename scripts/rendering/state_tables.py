"""Hits of models with linear attention, from ``benchmark/states.py``."""

from __future__ import annotations

from math import exp, log
from statistics import fmean
from typing import Any

from benchmark.serving.measured import table as _table
from scripts.rendering.figures import results

_SHAPES = {
    "conversations": "sessions that come and go",
    "closed": "always 16 sessions, turns in any order",
    "documents": "questions about shared documents",
    "scan": "six sessions beside prompts asked once",
    "agents": "sessions behind two long instructions",
    "lengths": "long sessions beside short ones, turns in any order",
}
_ARMS = ("blind", "leaves", "importance")


def _rows(strategy: str | None = None, *, plain: bool = False) -> list[dict[str, Any]]:
    return [
        row
        for row in results("states")["rows"]
        if (row["states"] == 0) is plain and strategy in (None, row["strategy"])
    ]


def _mean(rows: list[dict[str, Any]], arm: str) -> float:
    return exp(fmean(log(row["over_lru"][arm]) for row in rows))


def states_over_lru(arm: str) -> float:
    """Hit tokens over LRU's, geometric mean over shapes, strategies and sizes of the pools."""
    return _mean(_rows(), arm)


def plain_over_lru() -> float:
    """The same of importance on plain KV."""
    return _mean(_rows(plain=True), "importance")


def states_worse(arm: str) -> tuple[int, int]:
    """In how many of all settings the arm finds fewer tokens than LRU, and how many there are."""
    rows = _rows()
    return sum(row["over_lru"][arm] < 1 for row in rows), len(rows)


def states_table() -> str:
    """Hit tokens over LRU's by shape of traffic, many and few states apart, and on plain KV."""
    lines = []
    for shape, words in _SHAPES.items():
        of_shape = [row for row in _rows() if row["shape"] == shape]
        fewest = min(row["states"] for row in of_shape)
        groups = [[row for row in of_shape if (row["states"] == fewest) is few] for few in (False, True)]
        plain = [row for row in _rows(plain=True) if row["shape"] == shape]
        cells = [f"{_mean(rows, arm):.2f}" for rows in groups for arm in _ARMS]
        lines.append([words, *cells, f"{_mean(plain, 'importance'):.2f}"])
    names = ("before", "KV only", "KV and states")
    titles = [f"{size} states: {name}" for size in ("36 and 46", "16") for name in names]
    return _table(["traffic", *titles, "plain KV"], lines)


def shadow_excess() -> float:
    """Hits of LRU on plain KV, which a shadow cache finds, over those with states: at the most."""

    def hits(row: dict[str, Any]) -> int:
        return sum(row["hit_tokens"]["lru"])

    plain = {(row["shape"], row["strategy"], row["kv_tokens"]): hits(row) for row in _rows(plain=True)}
    return max(plain[row["shape"], row["strategy"], row["kv_tokens"]] / hits(row) for row in _rows())
