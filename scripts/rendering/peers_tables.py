"""What other servers compute of the same prompts, made of ``benchmark/results/peers.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.intervals import interval as _interval
from benchmark.serving.measured import table as _table
from scripts.rendering.figures import results

_Row = Mapping[str, Any]
_Rows = Mapping[int, _Row]
_ARMS = {  # stock sglang, vLLM and ours, by where KV may lie
    "device": ("stock sglang", "vLLM", "ours"),
    "device, host": ("stock + HiCache", "vLLM + LMCache", "ours + HiCache"),
}
_OTHERS = {
    "llama.cpp": "device",
    "llama.cpp + host": "device, host",
    "stock + LMCache": "device, host",
    "vLLM + LMCache": "device, host",
}
_WORKLOADS = ("agents", "documents", "chat", "scan")
_QUARTER = {"agents": 8_192}
_AGENTS_GOAL, _GOAL = 0.95, 1.01
_LOADS = {
    "learnt": "as above",
    "longer, a pool as before": "4 times the tokens, same pool",
    "longer, a quarter": "4 times the tokens and the pool",
    "longer, a quarter, more alive": "the same, 16 alive",
}
_WAITS_LOADS = {
    "served": "as served, 4 alive",
    "longer, a pool as before": "4 times the tokens, same pool",
    "longer, a quarter": "4 times the tokens and the pool",
    "longer, a quarter, more alive": "the same, 16 alive",
}
_WAITS_ORDERS = {
    "vllm": "vLLM",
    "ours": "ours",
    "waits": "knows how waits are distributed",
    "ours (told)": "ours, told which sessions are over",
    "waits and ends": "knows the distribution, told",
    "foresight": "foresight",
}
_ORDERS = {
    "ours": "ours, nothing learnt",
    "ledger": "ours, from a ledger",
    "tables": "ours, turns' life tables too",
    "goes on": "ours, never restarted",
    "foresight": "foresight",
}


def _rows(workload: str, arm: str, pool: int | None = None, clients: int = 1, layers: int = 1) -> _Rows:
    """By seed, at a quarter of the unique tokens where no pool is named."""
    wanted = workload, arm, pool or _QUARTER.get(workload, 4_096), clients, layers
    names = "workload", "arm", "pool", "clients", "layers"
    found = (row for row in results("peers")["rows"] if tuple(row[name] for name in names) == wanted)
    return {row["seed"]: row for row in found}


def _ratios(own: _Rows, *beside: _Rows) -> list[float]:
    """Computed tokens over those of the best of others, for each seed that all have."""
    seeds = sorted(set(own).intersection(*beside))
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
    return _cell(_ratios(_rows(workload, arm, pool, clients), _rows(workload, peer, pool, clients)))


def peers_each(arm: str, peer: str, workload: str) -> str:
    """Computed tokens over a peer's, of each seed that both have: for too few of them for an interval."""
    return _each(_ratios(_rows(workload, arm), _rows(workload, peer)))


def _each(ratios: Sequence[float]) -> str:
    return " and ".join(f"{ratio:.2f}" for ratio in ratios)


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


def peers_requests(workload: str) -> str:
    """From how few to how many requests a seed has."""
    requests = [row["requests"] for row in _rows(workload, "stock sglang").values()]
    return f"{min(requests)} to {max(requests)}"


def peers_counts() -> str:
    """Computed prompt tokens of every arm, thousands: mean of the seeds that the arms of a line have."""
    lines = []
    for tiers, arms in _ARMS.items():
        for workload in _WORKLOADS:
            found = {arm: rows for arm in arms if (rows := _rows(workload, arm))}
            seeds = sorted(set.intersection(*map(set, found.values()))) if arms[-1] in found else []
            if not seeds:
                continue
            first = next(iter(found.values()))
            sent = [_mean(first, seeds, number) for number in ("requests", "prompt_tokens", "unique_tokens")]
            cells = [_mean(found[arm], seeds, "computed_tokens") if arm in found else "-" for arm in arms]
            lines.append([workload, tiers, str(len(seeds)), *sent, *cells])
    header = ["workload", "KV in", "seeds", "requests", "prompts", "unique", "stock sglang", "vLLM", "ours"]
    return _table(header, lines)


def _mean(rows: _Rows, seeds: Sequence[int], number: str) -> str:
    mean = sum(rows[seed][number] for seed in seeds) / len(seeds)
    return f"{mean:.0f}" if number == "requests" else f"{mean / 1e3:.1f}"


def peers_goals() -> str:
    """Ours over each peer of the same tiers, seed by seed; seeds with fewer and with more; what goals say."""
    lines = []
    for tiers, (stock, vllm, ours) in _ARMS.items():
        for workload in _WORKLOADS:
            own, peers = _rows(workload, ours), [_rows(workload, stock), _rows(workload, vllm)]
            known = [peer for peer in peers if peer]
            if not own or not known:
                continue
            goal = _AGENTS_GOAL if workload == "agents" else _GOAL
            beside = [_won(_ratios(own, peer)) if peer else "-" for peer in peers]
            best = _ratios(own, *known)
            lines.append([workload, tiers, *beside, _cell(best), f"{_judged(best, goal)} ({goal})"])
    header = ["ours / stock sglang, fewer : more", "ours / vLLM, fewer : more", "ours / best of both"]
    return _table(["workload", "KV in", *header, "goal"], lines)


def peers_others() -> str:
    """Peers that the tables of all tiers leave out, beside stock sglang and ours of the same tiers."""
    lines = []
    for peer, tiers in _OTHERS.items():
        stock, _, ours = _ARMS[tiers]
        for workload in _WORKLOADS:
            rows = _rows(workload, peer)
            if not rows:
                continue
            beside = [_ratios(rows, _rows(workload, stock)), _ratios(_rows(workload, ours), rows)]
            lines.append([peer, tiers, workload, str(len(rows)), *map(_cell, beside)])
    header = ["peer", "KV in", "workload", "seeds", "peer / stock sglang", "ours / peer"]
    return _table(header, lines)


def _won(ratios: Sequence[float]) -> str:
    return f"{_cell(ratios)}, {sum(ratio < 1 for ratio in ratios)} : {sum(ratio > 1 for ratio in ratios)}"


def _judged(ratios: Sequence[float], goal: float) -> str:
    if len(ratios) < 2:
        return "one seed"
    _, low, high = _interval(ratios)
    return "met" if high <= goal else "missed" if low > goal else "open"


def peers_predicted(workload: str) -> str:
    """Of how many seeds ``observe`` said to the token what stock sglang computed, and what ours did."""
    observed, *arms = (_rows(workload, arm) for arm in ("observe", "stock sglang", "ours"))
    said = 0
    for seed, row in observed.items():
        found = (row["predicted"][name] for name in ("lru_hit_tokens", "importance_hit_tokens"))
        predicted = [row["prompt_tokens"] - tokens for tokens in found]
        said += predicted == [arm[seed]["computed_tokens"] for arm in arms]
    return f"{said} of {len(observed)}"


def peers_shadows() -> str:
    """What shadow caches compute over what the server did, stock's recency and ours, where both are known."""
    found = []
    for order, arm in (("lru", "stock sglang"), ("ours", "ours")):
        ratios = []
        for (workload, _), shadows in _sizes().items():
            for shadow in shadows:
                row = _rows(workload, arm, shadow["pool"]).get(shadow["seed"])
                ratios += [shadow[order] / row["computed_tokens"]] if row else []
        found.append(ratios)
    return " and ".join(f"{min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} rows" for ratios in found)


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


def _sizes() -> dict[tuple[str, float], list[_Row]]:
    """Rows of each workload and share of its tokens that the pool holds."""
    by_cell: dict[tuple[str, float], list[_Row]] = {}
    for row in results("peers_sizes")["rows"]:
        if row["fits"]:
            by_cell.setdefault((row["workload"], row["share"]), []).append(row)
    return by_cell


def peers_size(order: str, workload: str, share: float) -> str:
    """Replayed: computed tokens over recency's."""
    return _cell([row[order] / row["lru"] for row in _sizes()[workload, share]])


def peers_sizes() -> str:
    """Replayed by the size of the pool: computed tokens over recency's, and ours over the better of both."""
    lines = []
    for (workload, share), rows in _sizes().items():
        ratios = [
            _cell([row[order] / row["lru"] for row in rows]) if order in rows[0] else "-"
            for order in ("vllm", "ours", "ours (told)", "foresight")
        ]
        best = [row["ours"] / min(row["lru"], row["vllm"]) for row in rows]
        goal = _AGENTS_GOAL if workload == "agents" else _GOAL
        lines.append(
            [
                f"{workload}, 1/{1 / share:.0f}",
                str(len(rows)),
                *ratios,
                f"{_cell(best)}: {_judged(best, goal)} ({goal})",
            ]
        )
    header = ["vLLM", "ours", "ours, told which sessions are over", "foresight", "ours / best of both: goal"]
    return _table(["workload, pool", "seeds", *header], lines)


def _learnt(name: str) -> list[_Row]:
    return [row for row in results("peers_learnt")["rows"] if row["name"] == name]


def _of_recency(rows: Sequence[_Row], order: str) -> list[str]:
    """Computed tokens over recency's: of all requests, and of each third."""
    whole = [sum(row[order]) / sum(row["lru"]) for row in rows]
    thirds = ([row[order][third] / row["lru"][third] for row in rows] for third in range(3))
    return [_cell(ratios) for ratios in (whole, *thirds)]


def peers_learnt(order: str, name: str = "learnt") -> str:
    """Replayed: computed tokens of all requests over recency's."""
    return _of_recency(_learnt(name), order)[0]


def peers_earlier() -> str:
    """From how few to how many requests of other sessions came first."""
    earlier = [row["earlier"] for row in _learnt("learnt")]
    return f"{min(earlier)} to {max(earlier)}"


def peers_learnt_table() -> str:
    """Replayed agents: computed tokens over recency's where more has been seen, or is sent."""
    lines = []
    for name, what in _LOADS.items():
        rows = _learnt(name)
        sent = f"{what}, {sum(row['requests'] for row in rows) / len(rows):.0f} requests"
        orders = {key: title for key, title in _ORDERS.items() if key in rows[0]}
        lines += [[sent, title, *_of_recency(rows, key)] for key, title in orders.items()]
    return _table(["load", "order", "all", "first third", "second", "last"], lines)


def peers_known_waits_table() -> str:
    """Replayed agents: computed tokens over recency's by what an order knows of sessions."""
    rows = results("peers_known_waits")["rows"]
    lines = []
    for name, what in _WAITS_LOADS.items():
        of_load = [row for row in rows if row["name"] == name]
        ratios = [[row[order] / row["lru"] for row in of_load] for order in _WAITS_ORDERS]
        lines.append([what, *map(_cell, ratios)])
    return _table(["load", *_WAITS_ORDERS.values()], lines)


def peers_known_waits(order: str, name: str, beside: str = "lru") -> str:
    """Replayed agents: computed tokens of an order over those of another."""
    rows = results("peers_known_waits")["rows"]
    return _cell([row[order] / row[beside] for row in rows if row["name"] == name])


def peers_vllm_blocks() -> str:
    """Of how many rows of vLLM's servers its rule, replayed, computes the same tokens."""
    rows = results("peers_vllm_blocks")["rows"]
    return f"{sum(row['counted_tokens'] == row['computed_tokens'] for row in rows)} of {len(rows)}"


def peers_whole_model() -> str:
    """Of how many rows of the whole model the slice computed the same tokens."""
    same = [
        row["computed_tokens"] == _rows(workload, arm)[seed]["computed_tokens"]
        for workload in _WORKLOADS
        for arm in ("stock sglang", "ours")
        for seed, row in _rows(workload, arm, layers=0).items()
    ]
    return f"{sum(same)} of {len(same)}"


def peers_equal_answers() -> str:
    """Of requests to other servers with the same slice of the model, how many got stock sglang's text."""
    same = asked = 0
    for workload in _WORKLOADS:
        reference = _rows(workload, "stock sglang")
        for arm in (arm for arms in _ARMS.values() for arm in arms if arm != "stock sglang"):
            for seed, row in _rows(workload, arm).items():
                if seed in reference and ("sessions" in row) == ("sessions" in reference[seed]):
                    pairs = list(zip(row["answers"].split(), reference[seed]["answers"].split(), strict=True))
                    same += sum(one == other for one, other in pairs)
                    asked += len(pairs)
    return f"{same:,} of {asked:,}"
