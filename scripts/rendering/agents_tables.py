"""Tables of recorded coding agents: replays and shadow caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmark.intervals import interval as _orders_interval
from benchmark.serving.measured import table as _table
from scripts.rendering.cells import interval as _interval
from scripts.rendering.cells import share as _share
from scripts.rendering.figures import results

_AGENT_POLICIES = {
    "lru": "`lru`",
    "ends not told": "`importance`, ends not told",
    "ends in classes": "ends as facts of nodes, no turns",
    "importance": "**`importance`** (turns)",
    "belady": "optimum",
}
_AGENT_ARMS = {
    "importance": "all of it",
    "without the end": "without how the answer ended",
    "without rhythm": "without the session's rhythm",
    "without length": "without the answer's length",
    "one class": "one class for all turns",
    "ages in requests": "ages in admitted requests",
    "ends in classes": "no turns: the ends in the classes of nodes",
    "ends not told": "no turns, no ends: classes of nodes only",
}


_FILES = {10: "agents_10", 20: "agents", 40: "agents_alive", 80: "agents_alive"}
"""By sessions alive at a time."""


def _agents(alive: int, policy: str) -> list[Mapping[str, Any]]:
    """Rows of one arm, by capacity."""
    rows = results(_FILES[alive])["rows"]
    return [each for each in rows if (each["alive"], each["policy"]) == (alive, policy)]


def _capacities() -> list[str]:
    return [f"{each['capacity']:.0%}" for each in _agents(20, "lru")]


def agents_table(alive: int) -> str:
    """Hit rates on recorded coding agents, with what they close of the gap from LRU to the optimum."""

    def cell(each: Mapping[str, Any]) -> str:
        return _share(each["hit_rate"]) + ("" if policy in ("lru", "belady") else f", {each['gap']:.0%}")

    lines = []
    for policy, shown in _AGENT_POLICIES.items():
        lines.append([shown, *(cell(each) for each in _agents(alive, policy))])
    return _table(["policy", *_capacities()], lines)


def agents_ablation() -> str:
    """What is closed of the gap without each fact, twenty sessions alive."""
    lines = []
    for policy, shown in _AGENT_ARMS.items():
        lines.append([shown, *(_interval(each, "gap") for each in _agents(20, policy))])
    return _table(["turns", *_capacities()], lines)


def agents_alive_table(policy: str = "importance") -> str:
    """What an arm closes of the gap with other numbers of sessions alive, and its worst beside LRU."""
    lines = []
    for alive in (10, 40, 80):
        found = _agents(alive, policy)
        worst = min(each["least_over_lru"] for each in found)
        (orders,) = {each["seeds"] for each in found}
        gaps = (_interval(each, "gap") for each in found)
        lines.append([str(alive), str(orders), *gaps, f"{worst:+.4f}"])
    return _table(["alive", "orders", *_capacities(), "worst beside LRU"], lines)


def agents_gap(alive: int, capacity: float) -> str:
    """Part of the gap that is closed, with its interval."""
    (found,) = [each for each in _agents(alive, "importance") if each["capacity"] == capacity]
    return _interval(found, "gap")


def agents_least_over_lru() -> float:
    """The worst of all capacities and orders, in hit rate."""
    return min(each["least_over_lru"] for each in results("agents")["rows"] if each["policy"] == "importance")


_SERVED_ARMS = {
    "vllm": "vLLM's order: single pages, from the ends of texts",
    "ends not told": "ends not told",
    "ends in classes": "ends as facts of nodes, no turns",
    "importance": "**`importance`** (turns)",
}


_BESIDE_VLLM = {
    "lru": "stock sglang",
    "ends not told": "ours, ends not told",
    "importance": "**ours**, told how answers end",
}


def _served(alive: int, in_time: bool) -> list[Mapping[str, Any]]:
    """Rows of shadow caches.

    Args:
        alive: sessions at a time.
        in_time: whether answers take time.
    """
    rows = results("agents_served" if alive == 20 else f"agents_served_{alive}")["rows"]
    return [each for each in rows if (each["tokens_per_second"] is not None) is in_time]


def agents_served_row(alive: int, capacity: float, in_time: bool = False) -> Mapping[str, Any]:
    """Of the policy."""
    rows = [each for each in _served(alive, in_time) if each["policy"] == "importance"]
    (found,) = [each for each in rows if each["capacity"] == capacity]
    return found


def agents_served_table(alive: int, in_time: bool = False) -> str:
    """Computed prompt blocks beside LRU where whole nodes are cached, and the worst hit rate beside it."""
    rows = _served(alive, in_time)
    of_lru = [each for each in rows if each["policy"] == "lru"]
    lines = [["pages of the pool", *(f"{each['pages']:,.0f}" for each in of_lru), ""]]
    if in_time:
        lines.append(["held by running requests", *(f"{each['held']:.0%}" for each in of_lru), ""])
    lines.append(["hit rate of `lru`", *(_share(each["hit_rate"]) for each in of_lru), ""])
    for policy, shown in _SERVED_ARMS.items():
        if not (found := [each for each in rows if each["policy"] == policy]):
            continue
        worst = min(each["least_over_lru"] for each in found)
        lines.append([shown, *(_interval(each, "uncached") for each in found), f"{worst:+.4f}"])
    return _table([f"{alive} alive", *_capacities(), "worst beside LRU"], lines)


def agents_served_in_short(policy: str) -> str:
    """Computed prompt blocks beside LRU over the sizes of the pool, twenty alive, answers at once."""
    found = [row["uncached"] for row in _served(20, in_time=False) if row["policy"] == policy]
    return f"{min(found):.2f} to {max(found):.2f}"


def agents_beside_vllm_in_short(alive: int, policy: str) -> str:
    """Computed prompt blocks beside vLLM's over the sizes of the pool, answers at once."""
    found = [row["beside_vllm"][0] for row in _served(alive, in_time=False) if row["policy"] == policy]
    return f"{min(found):.2f} to {max(found):.2f}"


def agents_beside_vllm_table() -> str:
    """Computed prompt blocks beside vLLM's where answers take no time."""
    lines = [
        [
            f"{alive} alive, {shown}",
            *(_beside_vllm(each) for each in _served(alive, in_time=False) if each["policy"] == policy),
        ]
        for alive in (20, 80)
        for policy, shown in _BESIDE_VLLM.items()
    ]
    return _table(["", *_capacities()], lines)


def _beside_vllm(row: Mapping[str, Any]) -> str:
    mean, low, high = row["beside_vllm"]
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"


def agents_served_kept_table() -> str:
    """Part of the gain over LRU that is left where answers take time, by what running requests hold."""
    found = []
    for alive in (20, 80):
        for in_time in _served(alive, in_time=True):
            if in_time["policy"] == "importance":
                at_once = agents_served_row(alive, in_time["capacity"])
                kept = (1 - in_time["uncached"]) / (1 - at_once["uncached"])
                found.append((in_time["held"], f"{alive}, {in_time['capacity']:.0%}", kept))
    found.sort()
    return _table(
        ["sessions alive, pool", *(size for _, size, _ in found)],
        [
            ["held by running requests", *(f"{held:.0%}" for held, _, _ in found)],
            ["of the gain is left", *(f"{kept:.0%}" for *_, kept in found)],
        ],
    )


_OFFLINE = {
    "importance": "**`importance`**, learnt online",
    "offline, when": "trees: expected back last goes first",
    "offline, rate": "trees: least likely back within ten minutes goes first",
}


def _offline(policy: str) -> list[Mapping[str, Any]]:
    """Rows of one arm, by capacity."""
    found = [each for each in results("agents_offline")["rows"] if each["policy"] == policy]
    return sorted(found, key=lambda each: each["capacity"])


def agents_offline(kind: str = "") -> str:
    """Part of the gap that models close which were fitted beforehand, and how much more than the policy.

    Args:
        kind: "by turns alone" for the arms in which shared blocks are ranked by their turn.
    """
    ending = f", {kind}" if kind else ""
    lines = []
    for policy, shown in _OFFLINE.items():
        rows = _offline(policy + ending)
        lines.append([shown, *(_interval(each, "gap") for each in rows)])
        if policy + ending != "importance":
            than = "more than the policy" + (" as it is" if policy == "importance" else "")
            lines.append([than, *(agents_offline_more(policy + ending, each["capacity"]) for each in rows)])
    return _table(["part of the gap", *(f"{each['capacity']:.0%}" for each in _offline("lru"))], lines)


def agents_offline_least() -> str:
    """The least part of what the better model gains over LRU that the policy does, where the model gains."""
    rows = results("agents_offline_alive")["rows"] + results("agents_offline")["rows"]
    gaps = {(each["alive"], each["capacity"], each["seeds"], each["policy"]): each["gap"] for each in rows}
    parts = {
        (alive, size): gaps[alive, size, seeds, "importance"] / gap
        for (alive, size, seeds, policy), gap in gaps.items()
        if policy == "offline, when" and gap > 0
    }
    (alive, size), least = min(parts.items(), key=lambda each: each[1])
    return f"at least {least:.2f} of it, with {alive} alive at {size:.0%}"


def agents_over_table() -> str:
    """What the policy closes of the gap, and what it would if it were told what is over."""
    lines = []
    for policy, shown in {"importance": "**`importance`**", "told what is over": "told what is over"}.items():
        lines.append([shown, *(_interval(each, "gap") for each in _agents(10, policy))])
    return _table(["part of the gap", *_capacities()], lines)


def agents_told_table() -> str:
    """What the policy closes of the gap where a share of the sessions say that they are over."""
    rows = results("agents_told")["rows"]
    shares = list(dict.fromkeys(row["share_told"] for row in rows))
    lines = [
        [f"{share:.0%}", *(_interval(row, "gap") for row in rows if row["share_told"] == share)]
        for share in shares
    ]
    return _table(["sessions that say so", *_capacities()], lines)


def agents_text_table() -> str:
    """Ours over LRU on whole texts, by pool and by what is told of the answers."""
    rows = results("agents_text")["rows"]
    columns = list(dict.fromkeys((row["pool"], row["arm"]) for row in rows))
    lines = []
    for workload, alive in dict.fromkeys((row["workload"], row["alive"]) for row in rows):
        cells = [row for row in rows if (row["workload"], row["alive"]) == (workload, alive)]
        ratios = ["{:.3f} ({:.3f} to {:.3f})".format(*_orders_interval(row["over_lru"])) for row in cells]
        lines.append([workload, str(alive), *ratios])
    head = [f"{pool:,} tokens, {arm}" for pool, arm in columns]
    return _table(["sessions", "alive", *head], lines)


def longer_share(traffic: str) -> str:
    """Share of a traffic's requests that go on from an earlier one with a longer prompt."""
    (row,) = [row for row in results("conversations")["rows"] if row["traffic"] == traffic]
    return f"{row['longer']:.2f}".removeprefix("0") if row["longer"] else "0"


def agents_text_pooled(arm: str) -> str:
    """The same, all sizes of all workloads alike, with its interval over the orders."""
    rows = [row["over_lru"] for row in results("agents_text")["rows"] if row["arm"] == arm]
    by_order = [sum(order) / len(order) for order in zip(*rows, strict=True)]
    mean, low, high = _orders_interval(by_order)
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


def agents_offline_more(policy: str, capacity: float) -> str:
    """How much more of the gap an arm closes than the policy in the same orders, with its interval."""
    (found,) = [each for each in _offline(policy) if each["capacity"] == capacity]
    return _interval(found, "beside_importance", "beside_low", "beside_high", "+.3f")


def agents_offline_difference(one: str, other: str, capacity: float) -> str:
    """How much more of the gap one arm closes than another in the same orders, with its interval."""
    gaps = [
        next(each["gaps"] for each in _offline(policy) if each["capacity"] == capacity)
        for policy in (one, other)
    ]
    mean, low, high = _orders_interval([mine - theirs for mine, theirs in zip(*gaps, strict=True)])
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def agents_offline_orders() -> int:
    """Orders of sessions that the models were tried in."""
    (orders,) = {each["seeds"] for each in results("agents_offline")["rows"]}
    return int(orders)
