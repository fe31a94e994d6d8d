"""Tables of leaves: whether victims should be cut, and whether shadows and replays follow a server."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmark.serving.measured import table
from scripts.rendering.cells import interval as _interval
from scripts.rendering.figures import results
from sgl_importance.observe.shadow.comparison import student_quantile

_POOLS = ("1/8", "1/4", "1/2")
_SHOWN = {"long": "agents, longer turns"}


def _log_ratios() -> dict[str, dict[int, dict[str, float]]]:
    """Of computed tokens, cut victims over whole ones, by workload, seed and pool."""
    computed = {
        (row["workload"], row["seed"], row["share"], row["arm"]): row["computed"]
        for row in results("parts_of_leaves")["rows"]
    }
    found: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for (workload, seed, share, arm), tokens in computed.items():
        if arm == "cut":
            found[workload][seed][share] = math.log(tokens / computed[workload, seed, share, "whole"])
    return found


def _ratio(logs: Sequence[float]) -> str:
    """Geometric mean over seeds with its 95 % interval (Student's t)."""
    mean = float(np.mean(logs))
    half = student_quantile(0.975, len(logs) - 1) * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    bounds = {"mean": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}
    return _interval(bounds, "mean", form=".3f")


def cut_leaves(workload: str, pool: str = "") -> str:
    """Computed tokens with cut victims over those with whole ones; of all pools, or of one."""
    by_seed = _log_ratios()[workload].values()
    if pool:
        return _ratio([each[pool] for each in by_seed])
    return _ratio([float(np.mean(list(each.values()))) for each in by_seed])


def cut_leaves_table() -> str:
    lines = []
    for workload, by_seed in _log_ratios().items():
        pools = next(iter(by_seed.values()))
        cells = [cut_leaves(workload, pool) if pool in pools else "" for pool in _POOLS]
        lines.append([_SHOWN.get(workload, workload), *cells, cut_leaves(workload)])
    return table(["workload", *(f"pool {pool}" for pool in _POOLS), "all"], lines)


def cut_leaves_seeds() -> int:
    (seeds,) = {len(by_seed) for by_seed in _log_ratios().values()}
    return seeds


_TIERS = {"device": "device"}
_TIERS |= {policy: f"and host, `{policy}`" for policy in ("write_through", "write_back")}


def _served_log_ratios() -> dict[str, dict[str, dict[int, float]]]:
    """Of tokens that servers computed, cut victims over whole ones, by load, tiers and seed."""
    computed = {
        (row["load"], row["tiers"], row["seed"], row["arm"]): row["computed"]
        for row in results("parts_of_leaves_served")["rows"]
    }
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for (load, tiers, seed, arm), tokens in computed.items():
        if arm == "cut":
            found[load][tiers][seed] = math.log(tokens / computed[load, tiers, seed, "whole"])
    return found


def served_cut_leaves(load: str, tiers: str) -> str:
    """Tokens that servers computed with cut victims, over those with whole ones."""
    by_seed = _served_log_ratios()[load].get(tiers)
    return _ratio(list(by_seed.values())) if by_seed else ""


def served_cut_leaves_table() -> str:
    return table(
        ["requests", *_TIERS.values()],
        [[load, *(served_cut_leaves(load, tiers) for tiers in _TIERS)] for load in _served_log_ratios()],
    )


def served_cut_leaves_worse() -> str:
    """How many pairs of servers computed more with cuts, and by how much at most."""
    logs = [each for tiers in _served_log_ratios().values() for by in tiers.values() for each in by.values()]
    worse = [each for each in logs if each > 0]
    return f"{len(worse)} of {len(logs)}, by {100 * math.expm1(max(worse)):.1f} % at most,"


def _off(row: Mapping[str, Any], by: str) -> str:
    if row[by] is None:
        return ""
    return f"{row[by]:,} ({100 * (row[by] / row['server'] - 1):+.1f} %)"


def served_agreement_table() -> str:
    """Computed tokens of servers, and of who follows them."""
    return table(
        ["requests", "evicts", "tiers", "at a time", "server", "shadow", "replay", "replay of blocks"],
        [
            [
                row["workload"],
                f"`{row['policy']}`",
                "device" if row["tiers"] == "device" else f"and host, `{row['tiers']}`",
                str(row["at_a_time"]),
                f"{row['server']:,}",
                *(_off(row, by) for by in ("shadow", "replay", "replay_of_blocks")),
            ]
            for row in results("agreement")["rows"]
        ],
    )
