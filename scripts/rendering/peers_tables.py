"""What other servers compute of the same prompts, made of ``benchmark/results/peers.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.intervals import interval as _interval
from benchmark.serving.measured import table as _table
from scripts.rendering.figures import results

_Row = Mapping[str, Any]
_OURS = {"device": "ours", "host": "ours + HiCache"}
_PEERS = {"device": ("stock sglang", "vLLM"), "host": ("stock + HiCache",)}
_WORKLOADS = ("agents", "documents", "chat", "scan")


def _rows(workload: str, arm: str) -> dict[int, _Row]:
    """By seed."""
    found = (row for row in results("peers")["rows"] if (row["workload"], row["arm"]) == (workload, arm))
    return {row["seed"]: row for row in found}


def _ratios(workload: str, arm: str, beside: Sequence[str]) -> list[float]:
    """Computed tokens over those of the best of others, for each seed that all have."""
    own, others = _rows(workload, arm), [_rows(workload, each) for each in beside]
    seeds = [seed for seed in own if others and all(seed in each for each in others)]
    return [
        own[seed]["computed_tokens"] / min(each[seed]["computed_tokens"] for each in others) for seed in seeds
    ]


def _cell(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    mean, low, high = _interval(ratios)
    return f"{mean:.2f} ({low:.2f} to {high:.2f})" if len(ratios) > 1 else f"{mean:.2f}"


def peers_over(arm: str, peer: str, workload: str) -> str:
    """Computed tokens over a peer's: mean of the seeds that both have, with its interval."""
    return _cell(_ratios(workload, arm, [peer]))


def peers_missed(workload: str) -> str:
    """Why ours did not find what it computed, commonest first, as shares; the last seed that says it."""
    told = [row["missed"] for row in _rows(workload, "ours").values() if row.get("missed")]
    reasons = sorted(told[-1].items(), key=lambda reason: -reason[1])
    total = sum(told[-1].values())
    return ", ".join(f"{name.replace('_', ' ')} {value / total:.0%}" for name, value in reasons[:4])


def peers_counts() -> str:
    """Computed prompt tokens of every arm, thousands: mean of the seeds that all arms of a workload have."""
    arms = [arm for tiers, own in _OURS.items() for arm in (*_PEERS[tiers], own)]
    lines = []
    for workload in _WORKLOADS:
        found = {arm: rows for arm in arms if (rows := _rows(workload, arm))}
        seeds = sorted(set.intersection(*(set(rows) for rows in found.values())))

        def mean(arm: str, number: str, found: Any = found, seeds: Any = seeds) -> str:
            return f"{sum(found[arm][seed][number] for seed in seeds) / len(seeds) / 1e3:.1f}"

        sent = [mean("ours", number) for number in ("prompt_tokens", "unique_tokens")]
        cells = [mean(arm, "computed_tokens") if arm in found else "-" for arm in arms]
        lines.append([workload, str(len(seeds)), *sent, *cells])
    return _table(["workload", "seeds", "prompts", "unique", *arms], lines)


def peers_goals() -> str:
    """Ours over each peer of the same tiers, seed by seed."""
    lines = []
    for workload in _WORKLOADS:
        pairs = [(tiers, peer) for tiers in _OURS for peer in _PEERS[tiers]]
        lines.append([workload, *(_cell(_ratios(workload, _OURS[tiers], [peer])) for tiers, peer in pairs)])
    return _table(["workload", *(f"ours / {peer}" for tiers in _OURS for peer in _PEERS[tiers])], lines)


def peers_equal_answers() -> str:
    """Of requests to two servers, how many got the same text as from stock sglang."""
    same = asked = 0
    for workload in _WORKLOADS:
        reference = _rows(workload, "stock sglang")
        for arm in ("vLLM", "ours", "ours + HiCache", "stock + HiCache"):
            for seed, row in _rows(workload, arm).items():
                if seed in reference:
                    pairs = list(zip(row["answers"].split(), reference[seed]["answers"].split(), strict=True))
                    same += sum(one == other for one, other in pairs)
                    asked += len(pairs)
    return f"{same:,} of {asked:,}"
