"""Tables of what was tried on recorded coding agents: turns in the ledger, rules on top of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmark.serving.measured import table as _table
from scripts.rendering.cells import interval as _interval
from scripts.rendering.cells import share as _share
from scripts.rendering.figures import results

_KEPT = {
    "tables kept": "life tables of turns kept: more",
    "all kept": "every turn kept, too: more",
}
_RULES = {
    "own text x 0.2": "a new text has to be worth five times what it displaces",
    "own text x 0.5": "twice what it displaces",
    "own text x 2": "it counts twice",
    "own text first": "it always stays, as on a server",
    "cut goes on": "a session that lost its tail goes on losing",
    "cut is spared": "it loses nothing more while there are others",
}


def _restarts(policy: str) -> list[Mapping[str, Any]]:
    """Rows of one arm, by capacity."""
    return [each for each in results("agents_restart")["rows"] if each["policy"] == policy]


def agents_restart_table() -> str:
    """Hit rates of the hour behind a restart, and what a ledger would add that kept turns."""
    lines = [
        ["hit rate of `lru`", *(_share(each["hour"]) for each in _restarts("lru"))],
        [
            "**`importance`**, turns learnt anew",
            *(_share(each["hour"]) for each in _restarts("no turns kept")),
        ],
    ]
    beside = (
        {"more": -each["more"], "low": -each["high"], "high": -each["low"]} for each in _restarts("lru")
    )
    lines.append(["more than `lru`", *(_interval(each, "more", form="+.4f") for each in beside)])
    for policy, shown in _KEPT.items():
        lines.append([shown, *(_interval(each, "more", form="+.4f") for each in _restarts(policy))])
    capacities = [f"{each['capacity']:.0%}" for each in _restarts("lru")]
    return _table(["the hour behind a restart", *capacities], lines)


def agents_restart_kept(value: str = "") -> str:
    """What kept life tables add at 1 %: to the hour, or ("rest_") to all behind it."""
    found = next(each for each in _restarts("tables kept") if each["capacity"] == 0.01)
    return _interval(found, f"{value}more", f"{value}low", f"{value}high", "+.4f")


def agents_restart_requests() -> float:
    """Requests of that hour, mean over the orders."""
    (requests,) = {each["requests_in_hour"] for each in results("agents_restart")["rows"]}
    return float(requests)


def agents_admission_table() -> str:
    """How much less or more of the gap is closed with a rule on top of the policy."""
    rows = results("agents_admission")["rows"]
    cells = sorted({(each["alive"], each["capacity"]) for each in rows})
    lines = []

    def of(policy: str) -> list[Mapping[str, Any]]:
        found = {(each["alive"], each["capacity"]): each for each in rows if each["policy"] == policy}
        return [found[cell] for cell in cells]

    lines.append(
        ["**`importance`**, part of the gap", *(_interval(each, "gap") for each in of("importance"))]
    )
    for policy, shown in _RULES.items():
        more = (
            _interval(each, "beside_importance", "beside_low", "beside_high", "+.3f") for each in of(policy)
        )
        lines.append([shown, *more])
    return _table(["sessions alive, pool", *(f"{alive}, {size:.0%}" for alive, size in cells)], lines)


def agents_admission_orders() -> int:
    """Orders of sessions that the rules were tried in."""
    (orders,) = {each["seeds"] for each in results("agents_admission")["rows"]}
    return int(orders)


def agents_restart_orders() -> int:
    """Orders of sessions in which the server was restarted."""
    (orders,) = {each["seeds"] for each in results("agents_restart")["rows"]}
    return int(orders)
