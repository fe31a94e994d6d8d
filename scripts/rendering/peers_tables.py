"""What other servers compute of the same prompts, made of ``benchmark/results/peers.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.intervals import interval as _interval
from benchmark.serving.measured import table as _table
from scripts.rendering.figures import results

_Row = Mapping[str, Any]
_OURS = {"device": "ours", "host": "ours + HiCache"}
_PEERS = {"device": ("stock sglang", "vLLM"), "host": ("stock + HiCache",)}
_PAIRS = [(_OURS[tiers], peer) for tiers in _OURS for peer in _PEERS[tiers]]
_ARMS = [arm for tiers, own in _OURS.items() for arm in (*_PEERS[tiers], own)]
_WORKLOADS = ("agents", "documents", "chat", "scan")
_QUARTER = {"agents": 8_192}
_AGENTS_GOAL, _GOAL = 0.95, 1.01


def _rows(
    workload: str, arm: str, pool: int | None = None, clients: int = 1, layers: int = 1
) -> dict[int, _Row]:
    """By seed, at a quarter of the unique tokens where no pool is named."""
    wanted = workload, arm, pool or _QUARTER.get(workload, 4_096), clients, layers
    names = "workload", "arm", "pool", "clients", "layers"
    found = (row for row in results("peers")["rows"] if tuple(row[name] for name in names) == wanted)
    return {row["seed"]: row for row in found}


def _ratios(own: Mapping[int, _Row], beside: Sequence[Mapping[int, _Row]]) -> list[float]:
    """Computed tokens over those of the best of others, for each seed that all have."""
    seeds = [seed for seed in sorted(own) if beside and all(seed in each for each in beside)]
    return [
        own[seed]["computed_tokens"] / min(each[seed]["computed_tokens"] for each in beside) for seed in seeds
    ]


def _cell(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    mean, low, high = _interval(ratios)
    return f"{mean:.2f} ({low:.2f} to {high:.2f})" if len(ratios) > 1 else f"{mean:.2f}"


def peers_over(arm: str, peer: str, workload: str, pool: int | None = None, clients: int = 1) -> str:
    """Computed tokens over a peer's: mean of the seeds that both have, with its interval."""
    return _cell(_ratios(_rows(workload, arm, pool, clients), [_rows(workload, peer, pool, clients)]))


def peers_won(arm: str, peer: str, workload: str) -> str:
    """On how many seeds an arm computes fewer tokens than a peer, and of how many."""
    ratios = _ratios(_rows(workload, arm), [_rows(workload, peer)])
    return f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)}"


def peers_missed(workload: str, arm: str = "ours") -> str:
    """Why ours did not find what it computed, commonest first, as shares of all seeds together."""
    found: Counter[str] = Counter()
    for row in _rows(workload, arm).values():
        found.update(row["missed"])
    shares = [(name.replace("_", " "), tokens / found.total()) for name, tokens in found.most_common(4)]
    return ", ".join(f"{name} {share:.0%}" for name, share in shares)


def peers_cut() -> str:
    """Sessions of agents that were cut because the next prompt would be too long, of those that were sent."""
    rows = _rows("agents", "stock sglang").values()
    cut, sent = (sum(row[name] for row in rows) for name in ("cut_sessions", "sessions"))
    return f"{cut} of {sent}"


def peers_counts() -> str:
    """Computed prompt tokens of every arm, thousands: mean of the seeds that all arms of a workload have."""
    lines = []
    for workload in _WORKLOADS:
        found = {arm: rows for arm in _ARMS if (rows := _rows(workload, arm))}
        if not found:
            continue
        seeds = sorted(set.intersection(*(set(rows) for rows in found.values())))

        def mean(arm: str, number: str, found: Any = found, seeds: Any = seeds) -> str:
            return f"{sum(found[arm][seed][number] for seed in seeds) / len(seeds) / 1e3:.1f}"

        sent = [mean("stock sglang", number) for number in ("prompt_tokens", "unique_tokens")]
        cells = [mean(arm, "computed_tokens") if arm in found else "-" for arm in _ARMS]
        lines.append([workload, str(len(seeds)), *sent, *cells])
    return _table(["workload", "seeds", "prompts", "unique", *_ARMS], lines)


def peers_goals() -> str:
    """Ours over each peer of the same tiers, seed by seed; on how many seeds it computes less, and more."""
    lines = []
    for workload in _WORKLOADS:
        cells = []
        for own, peer in _PAIRS:
            ratios = _ratios(_rows(workload, own), [_rows(workload, peer)])
            less, more = sum(ratio < 1 for ratio in ratios), sum(ratio > 1 for ratio in ratios)
            cells.append(f"{_cell(ratios)}, {less} : {more}" if len(ratios) > 1 else _cell(ratios))
        lines.append([workload, *cells])
    return _table(["workload", *(f"ours / {peer}" for _, peer in _PAIRS)], lines)


def peers_best() -> str:
    """Ours over the best peer of the same tiers on each seed, and what the goal for it says."""
    lines = []
    for workload in _WORKLOADS:
        goal = _AGENTS_GOAL if workload == "agents" else _GOAL
        cells = []
        for tiers, own in _OURS.items():
            ratios = _ratios(_rows(workload, own), [_rows(workload, peer) for peer in _PEERS[tiers]])
            cells.append(f"{_cell(ratios)}: {_judged(ratios, goal)}" if ratios else "-")
        lines.append([workload, f"at most {goal}", *cells])
    return _table(["workload", "goal", *(f"device {tiers}" for tiers in ("alone", "and host"))], lines)


def _judged(ratios: Sequence[float], goal: float) -> str:
    _, low, high = _interval(ratios)
    return "met" if high <= goal else "missed" if low > goal else "open"


def peers_predicted() -> str:
    """Prompt tokens that ``observe`` said importance would compute, beside what it did compute."""
    lines = []
    for workload in _WORKLOADS:
        observed, ours, stock = (_rows(workload, arm) for arm in ("observe", "ours", "stock sglang"))
        seeds = sorted(set(observed) & set(ours) & set(stock))
        if not seeds:
            continue
        sent = sum(observed[seed]["prompt_tokens"] for seed in seeds)
        said = [
            sent - sum(observed[seed]["predicted"][f"{name}_hit_tokens"] for seed in seeds)
            for name in ("lru", "importance")
        ]
        got = [sum(rows[seed]["computed_tokens"] for seed in seeds) for rows in (stock, ours)]
        numbers = [
            f"{tokens / len(seeds) / 1e3:.1f}" for pair in zip(said, got, strict=True) for tokens in pair
        ]
        lines.append([workload, str(len(seeds)), *numbers])
    header = ["LRU, predicted", "stock sglang", "importance, predicted", "ours"]
    return _table(["workload", "seeds", *header], lines)


def peers_victims() -> str:
    """Replayed: computed tokens over recency's; and where ours took a leaf of another age, who was right."""
    lines = []
    for workload in _WORKLOADS:
        rows = [row for row in results("peers_victims")["rows"] if row["workload"] == workload]
        ratios = [_cell([row[order] / row["lru"] for row in rows]) for order in ("ours", "foresight")]
        judged: Counter[str] = Counter()
        for row in rows:
            judged.update(row["victims"])
        pairs = [
            " : ".join(f"{judged[f'{when}: {how}'] / 1e3:.0f}" for how in ("better", "worse"))
            for when in ("first third", "later")
        ]
        lines.append([workload, *ratios, *pairs])
    header = ["ours / recency", "foresight / recency", "first third, better : worse", "later, better : worse"]
    return _table(["workload", *header], lines)


def peers_equal_answers() -> str:
    """Of requests to other servers, how many got the same text as from stock sglang."""
    same = asked = 0
    for workload in _WORKLOADS:
        reference = _rows(workload, "stock sglang")
        for arm in _ARMS:
            for seed, row in _rows(workload, arm).items():
                if arm != "stock sglang" and seed in reference:
                    pairs = list(zip(row["answers"].split(), reference[seed]["answers"].split(), strict=True))
                    same += sum(one == other for one, other in pairs)
                    asked += len(pairs)
    return f"{same:,} of {asked:,}"
