"""Single numbers for sentences, read from ``benchmark/results``."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from benchmark import halves
from benchmark.serving.measured import Measured, bootstrap, paired_ratios

_ROOT = Path(__file__).resolve().parents[2]

Row = dict[str, Any]
Interval = tuple[float, float, float]
"""A median and its 95 % bootstrap interval."""


@cache
def results(name: str) -> Any:
    """A file of ``benchmark/results``, without its ending."""
    return json.loads((_ROOT / "benchmark/results" / f"{name}.json").read_text())


def row(name: str, **wanted: Any) -> Row:
    """The one row of a file that has these values.

    Raises:
        ValueError: none has, or several.
    """
    found: list[Row] = [each for each in results(name)["rows"] if wanted.items() <= each.items()]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows of {name}.json have {wanted}, not one")
    return found[0]


# ---- replay of public traces (benchmark/policy.py) ----

_NOT_PUBLISHED = {
    *("importance", "belady"),
    *("classes alone", "one class", "no visits", "no structure", "told who returns", "second hour"),
}


def policy_on(policy: str, trace: str = "mooncake") -> Row:
    """Hit rate of a policy by budget ("1%" to "20%"), its mean over LRU's, and its part of the gap."""
    return row("policy", trace=trace, policy=policy)


def over_lru(policy: str, trace: str = "mooncake") -> float:
    """Hit rate over that of LRU, mean over five cache sizes."""
    value: float = policy_on(policy, trace)["over_lru"]
    return value


def best_published(trace: str = "mooncake") -> str:
    """The published policy that hits most beside LRU."""
    rows = [r for r in results("policy")["rows"] if r["trace"] == trace and r["policy"] not in _NOT_PUBLISHED]
    return str(max(rows, key=lambda each: each["over_lru"])["policy"])


def spread(policy: str, value: str = "over_lru", traces: str = "random half") -> tuple[float, float]:
    """The least and the largest value of a policy over all traces whose names begin so."""
    values = [
        r[value]
        for r in results("policy")["rows"]
        if r["policy"] == policy and r["trace"].startswith(tuple(traces.split(",")))
    ]
    return min(values), max(values)


def below_best_of(*traces: str) -> float:
    """How far ours hits below the best published policy of a budget: the most over all traces so named.

    Args:
        traces: how their names begin.
    """
    least = [
        each["least_beside_best_published"]
        for each in results("policy")["rows"]
        if each["policy"] == "importance" and each["trace"].startswith(traces)
    ]
    return -min(least)


def published_replayed() -> int:
    """Published policies that ``benchmark/policy.py`` replays."""
    return len({each["policy"] for each in results("policy")["rows"]} - _NOT_PUBLISHED)


def policy_traces() -> int:
    """Traces that ``benchmark/policy.py`` replays."""
    return len({each["trace"] for each in results("policy")["rows"]})


def halves_shared_by_pairs() -> float:
    """Part of the requests that two of Mooncake's random windows have in common, mean over all pairs."""
    return halves.shared_by_pairs(halves.MOONCAKE_REQUESTS)


def halves_tuned_on() -> tuple[float, float]:
    """Part of such a window that lies in the half that was tuned on: the least and the most."""
    return halves.shared_with_first_half(halves.MOONCAKE_REQUESTS)


# ---- the serving benchmark (benchmark/serving) ----


@cache
def _serving() -> Measured:
    parameters = json.loads((_ROOT / "benchmark/serving/parameters.json").read_text())
    return Measured(results("serving")["rows"], parameters)


@cache
def first_token(workload: str = "fits", measured_by: str = "pairs", arm: str = "ours") -> Interval:
    """Median time to a first token over stock LRU's; servers side by side, or ("times") in open loop."""
    return bootstrap(paired_ratios(_serving().rows, workload, arm, "ttft_p50", measured_by=measured_by))


@cache
def seeds(workload: str, other: str, factor: int = 1, value: str = "uncached_share") -> Interval:
    """Our uncached tokens over those of ``other``, median of the seeds.

    Args:
        factor: how many times as long as the committed workload.
        value: ``seconds_share`` weighs tokens with what their prefill takes.
    """
    shares: dict[int, dict[str, float]] = {}
    for each in _serving().of("seeds", workload=workload, factor=factor):
        shares.setdefault(each["seed"], {})[each["policy"]] = each[value]
    return bootstrap([known["importance"] / known[other] for known in shares.values()])


def counted(workload: str, arm: str, other: str = "stock LRU", value: str = "uncached_tokens") -> float:
    """A count of an arm over that of another, on the benchmark's own stream of requests."""
    measured = _serving()
    return float(measured.value(workload, arm, value) / measured.value(workload, other, value))


@cache
def restart_ratio(arm: str = "ours") -> Interval:
    """Time of a first request after a restart over that of a warm one."""
    return bootstrap(_serving().restart_ratios(arm))


# ---- parts, each measured alone ----


def tree_microseconds(cache_name: str, operation: str = "evict_one") -> float:
    """Of one operation on a tree of 10,000 leaves."""
    value: float = row("tree", leaves=10_000, operation=operation, cache=cache_name)["microseconds"]
    return value


def emission(context: int) -> Row:
    """What page scores add to a decode step on a CPU, one request."""
    return row("emission", batch=1, context=context, **{"pass": "decode"})


def replay_speed(policy: str) -> float:
    """Million accesses a second of processor time."""
    value: float = row("replay", what=policy)["million_per_second"]
    return value


def replay_speed_of_others() -> tuple[float, float]:
    """The slowest and the fastest of the policies but LRU and ours, in million accesses a second."""
    fast, not_a_policy = {"lru", "importance"}, {"lru, definition", "lru, all capacities"}
    rates = [
        each["million_per_second"]
        for each in results("replay")["rows"]
        if each["what"] not in fast | not_a_policy and "processes" not in each["what"]
    ]
    return min(rates), max(rates)


def look_up(quantity: str) -> float:
    value: float = row("get_importance", quantity=quantity)["value"]
    return value


def insert_ratio(cache_name: str) -> float:
    """Time of an insert beside one that is not followed."""
    value: float = row("get_importance", operation="evict and insert 1024 tokens", cache=cache_name)["ratio"]
    return value


def gate(trace: str, write_policy: str, arm: str, value: str) -> float:
    """Of the tiered replay, over the same replay without a gate under ``write_through``.

    Args:
        value: ``hits``, ``recomputed``, ``ttft``, ``host_bytes`` or ``storage_bytes``.
    """
    (found,) = (
        each
        for each in results("gating")["rows"]
        if each["trace"].startswith(trace) and (each["write_policy"], each["arm"]) == (write_policy, arm)
    )
    return float(found[f"{value}_over_base"])


def soak_of_a_server(policy: str) -> Row:
    return row("soak", mode="server", policy=policy)


def study(name: str) -> Row:
    """What a study of recordings found: ``value``, ``low`` and ``high``."""
    value: Row = results(f"findings/{name}/{name}")["value"]
    return value


def write_back_hits() -> str:
    """What ``write_back`` hits, in times what ``write_through`` does: the least and most of all traces."""
    of_traces = [gate(trace, "write_back", "open", "hits") for trace in ("mooncake", "miniswe", "taubench")]
    return f"{min(of_traces):.2f} to {max(of_traces):.2f}"


def gate_beside(other: str, trace: str, write_policy: str, value: str, arm: str = "gate") -> float:
    """The same of an arm over ``other`` under the same write policy."""
    return gate(trace, write_policy, arm, value) / gate(trace, write_policy, other, value)


def gate_on_each(other: str, write_policy: str, value: str, arm: str = "gate", decimals: int = 3) -> str:
    """Of Mooncake, miniswe and taubench, as ``1.046, 0.953 and 1.027``."""
    first, second, third = (
        f"{gate_beside(other, trace, write_policy, value, arm):.{decimals}f}"
        for trace in ("mooncake", "miniswe", "taubench")
    )
    return f"{first}, {second} and {third}"


def seeds_range(other: str, factor: int, value: str = "uncached_share") -> tuple[float, float]:
    """The least and the largest of ``seeds`` over all workloads of that length."""
    workloads = {each["workload"] for each in _serving().of("seeds", factor=factor)}
    medians = [seeds(workload, other, factor, value)[0] for workload in workloads]
    return min(medians), max(medians)


def replayed(workload: str, policy: str, factor: int = 1) -> float:
    """Share of the prompt tokens that is not found, in the replay of the benchmark's requests."""
    (found,) = _serving().of("replay", workload=workload, policy=policy, factor=factor)
    value: float = found["uncached_share"]
    return value


def count(workload: str, arm: str, value: str) -> float:
    """A count of the serving benchmark as it is."""
    return float(_serving().counts[workload, arm][value])


def soak_sum(value: str) -> int:
    """Over all soaks of the tree alone."""
    return sum(each[value] for each in results("soak")["rows"] if each["mode"] == "tree")


def soak_growth(is_recorded: bool) -> tuple[float, float]:
    """The least and the largest growth of a tree's process, in KiB per 1,000 operations."""
    growth = [
        each["rss_kib_per_1000_operations"]
        for each in results("soak")["rows"]
        if each["mode"] == "tree" and each["recorded"] is is_recorded
    ]
    return min(growth), max(growth)


def scheduler_memory(policy: str) -> tuple[float, float, float]:
    """Of a server under load: MiB early and at the end, and MiB per 1,000 requests in the second half."""
    memory = soak_of_a_server(policy)["memory"]["scheduler 2"]
    return memory["mib_at_points"][1], memory["mib_at_points"][-1], memory["kib_per_1000_requests"] / 1024


def study_interval(name: str) -> Interval:
    found = study(name)
    return found["value"], found["low"], found["high"]


def answer_pages(whose: str) -> Interval:
    """Share of queries whose answer lies in the top pages of their ``own`` or of ``earlier`` attention."""
    found = row("findings/sensitivity/sensitivity", setting="base", value="as recorded")
    return found[f"{whose} answer"], found[f"{whose}_low"], found[f"{whose}_high"]


def put_off(what: str) -> tuple[float, float]:
    """Least and largest time that doing it later spared a first token, over batch sizes; microseconds.

    Args:
        what: the arm that does it at once.
    """
    spared = [
        at_once["before_answer"]
        - row("scheduler_cost_levels", running=at_once["running"], arm="as it is")["before_answer"]
        for at_once in results("scheduler_cost_levels")["rows"]
        if at_once["arm"] == what
    ]
    return min(spared), max(spared)
