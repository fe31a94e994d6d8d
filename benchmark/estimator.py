"""What other ways to estimate hazards would compute, beside the estimator as it is, on all recorded traffic.

    python benchmark/estimator.py claude_code_sessions.jsonl.gz mooncake_conversation.jsonl agents --resume

Traffic is that of ``benchmark/published.py``, block by block: Mooncake, the short sessions in ten orders and
a made cycle by classes of nodes alone; coding agents (odd lines, twenty alive) by turns, and once more
without the ends of answers. Changes:

- ``smoothed ages``: a quarter of each age bucket's evidence counts in either neighbour, since the retention
  index takes the best of many noisy buckets;
- ``weight from the evidence``: how many intervals a class's prior is worth follows from how much classes
  differ beyond chance (beta-binomial by moments, Kleinman 1973), where it is a constant now;
- ``heavier prior``: that constant is 2 for classes of nodes, not .5;
- ``heavier ratio``: "a class equals its level" is worth 8 expected hits, not 2.

A row is a traffic, a size and a change; ``computed`` has for each order the blocks computed over those of the
estimator as it is: below 1 is a gain. Hit rates are deterministic. The file is written after each order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer
from agents import BLOCK_TOKENS
from intervals import interval
from policy import FRACTIONS, interleaved_sessions
from published import ALIVE, CYCLE_FRACTIONS, Traffic, cycle
from results import RESULTS, print_rows, rows_so_far, write_results
from rich.progress import track

from sgl_importance.reuse import hazards as module
from sgl_importance.reuse.hazards import PRIORS, Priors, hazards
from sgl_importance.reuse.life_table import FloatArray, IntArray
from sgl_importance_lab.replay.compiled import fast_importance, fast_turns
from sgl_importance_lab.replay.formats.detect import read_trace
from sgl_importance_lab.replay.formats.kv_cache_tester import Session, merge_sessions, read_sessions
from sgl_importance_lab.replay.formats.line_reader import refuse_bad_record
from sgl_importance_lab.replay.trace import Trace
from sgl_importance_lab.replay.trace_turns import ranks_by_turns

Row = dict[str, Any]
Hazards = Callable[..., FloatArray]
AS_IT_IS = "as it is"
SHORT_ORDERS, AGENT_ORDERS = 10, 3
AGENT_FRACTIONS = (0.01, 0.02)
SHARE_OF_NEIGHBOUR = 0.25


def _smooth(counts: FloatArray) -> FloatArray:
    """Each bucket's evidence shared with its neighbours; at either end what would leave stays."""
    padded = np.pad(counts, ((0, 0), (1, 1)), mode="edge")
    kept = 1 - 2 * SHARE_OF_NEIGHBOUR
    shared: FloatArray = kept * counts + SHARE_OF_NEIGHBOUR * (padded[:, :-2] + padded[:, 2:])
    return np.ascontiguousarray(shared)


def smoothed(hits: FloatArray, reached: FloatArray, levels: IntArray, priors: Priors = PRIORS) -> FloatArray:
    return hazards(_smooth(hits), _smooth(reached), levels, priors)


def weighted_by_evidence(
    hits: FloatArray, reached: FloatArray, levels: IntArray, priors: Priors = PRIORS
) -> FloatArray:
    """Intervals that a class's prior is worth, from the correlation within classes."""
    pooled = (hits.sum(0) + priors.hazard_strength * priors.hazard) / (
        reached.sum(0) + priors.hazard_strength
    )
    strength = priors.ratio_strength
    ratio = (hits.sum(1) + strength) / (reached @ pooled + strength)
    mean = np.clip(ratio[:, None] * pooled, 1e-4, 0.999)
    chance = reached * mean * (1 - mean)
    beyond = float(((hits - reached * mean) ** 2 - chance).sum())
    most = float((chance * np.maximum(reached - 1, 0)).sum())
    correlation = min(max(beyond / most, 0.001), 0.9) if most > 0 else 1 / (1 + priors.class_strength)
    return hazards(hits, reached, levels, priors._replace(class_strength=(1 - correlation) / correlation))


def other_weights(
    hits: FloatArray,
    reached: FloatArray,
    levels: IntArray,
    priors: Priors = PRIORS,
    *,
    of_class: float | None = None,
    of_ratio: float | None = None,
) -> FloatArray:
    if of_class is not None and priors.class_strength == PRIORS.class_strength:  # those of turns stay
        priors = priors._replace(class_strength=of_class)
    if of_ratio is not None:
        priors = priors._replace(ratio_strength=of_ratio)
    return hazards(hits, reached, levels, priors)


CHANGES: dict[str, Hazards] = {
    AS_IT_IS: hazards,
    "smoothed ages": smoothed,
    "weight from the evidence": weighted_by_evidence,
    "heavier prior": partial(other_weights, of_class=2.0),
    "heavier ratio": partial(other_weights, of_ratio=8.0),
}


def traffic(sessions_file: Path, mooncake: Path, folder: Path) -> Iterator[Traffic]:
    for kind in ("miniswe", "taubench"):
        yield Traffic(kind, SHORT_ORDERS, FRACTIONS, partial(interleaved_sessions, folder / kind, kind))
    yield Traffic("mooncake", 1, FRACTIONS, lambda _: read_trace(mooncake))
    yield Traffic("cycle", 1, CYCLE_FRACTIONS, cycle)

    @cache
    def sessions() -> list[Session]:
        _, every = read_sessions(sessions_file, BLOCK_TOKENS, refuse_bad_record)
        return [session for session in every if session.line % 2]

    def merged(seed: int) -> Trace:
        return merge_sessions("agents", BLOCK_TOKENS, sessions(), ALIVE, seed, refuse_bad_record)

    def not_told(seed: int) -> Trace:
        trace = merged(seed)
        return replace(trace, answer_ends=np.zeros_like(trace.answer_ends))

    yield Traffic("agents, ends not told", AGENT_ORDERS, AGENT_FRACTIONS, not_told)
    yield Traffic("agents", AGENT_ORDERS, AGENT_FRACTIONS, merged)


def hit_rate(trace: Trace, fraction: float, change: Hazards) -> float:
    capacity = max(1, int(fraction * trace.num_blocks))
    with (
        patch.object(module, "hazards", change),
        patch.object(fast_importance, "hazards", change),
        patch.object(fast_turns, "hazards", change),
    ):
        replayed = fast_turns.replay_turns if ranks_by_turns(trace) else fast_importance.replay_importance
        return replayed(trace, capacity).hit_blocks / trace.num_accesses


def pooled(rows: list[Row]) -> list[Row]:
    """Of each traffic with several orders, and of all together, the mean over sizes with an interval over
    orders; of all together over everything, each traffic counting alike."""
    found: list[Row] = []
    for change in CHANGES:
        if change == AS_IT_IS:
            continue
        logs = {
            name: np.log(
                [row["computed"] for row in rows if (row["traffic"], row["change"]) == (name, change)]
            )
            for name in dict.fromkeys(row["traffic"] for row in rows)
        }
        for name, values in logs.items():
            low = high = None
            mean = float(values.mean())
            if values.shape[1] > 1:
                mean, low, high = interval(values.mean(axis=0).tolist())
            worst = float(np.exp(values.mean(axis=1).max()))
            found.append(_of_logs(name, change, mean, low, high) | {"worst_size": worst})
        found.append(_of_logs("all", change, *interval([float(each.mean()) for each in logs.values()])))
    return found


def _of_logs(traffic: str, change: str, mean: float, low: float | None, high: float | None) -> Row:
    bounds = {
        name: None if each is None else float(np.exp(each)) for name, each in (("low", low), ("high", high))
    }
    return {"traffic": traffic, "change": change, "pooled": float(np.exp(mean)), **bounds}


def main(
    sessions_file: Annotated[Path, typer.Argument(help="claude_code_sessions.jsonl.gz, or a file like it.")],
    mooncake: Annotated[Path, typer.Argument(help="mooncake_conversation.jsonl.")],
    folder: Annotated[Path, typer.Argument(help="Folder with the folders miniswe and taubench.")],
    names: Annotated[
        str, typer.Option("--traffic", help="Names of traffic, with semicolons between; all if absent.")
    ] = "",
    resume: Annotated[bool, typer.Option(help="Leave out what the JSON has.")] = False,
    out: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "estimator.json",
) -> None:
    """Measures and writes the results."""
    rows = [row for row in rows_so_far(out) if "computed" in row] if resume else []
    known = {(row["traffic"], row["capacity"], row["change"]): row for row in rows}
    kinds = [
        kind
        for kind in traffic(sessions_file, mooncake, folder)
        if not names or kind.name in names.split(";")
    ]
    for kind in kinds:
        for order in track(range(kind.orders), description=kind.name):
            missing = [
                (fraction, change)
                for fraction in kind.fractions
                for change in CHANGES
                if len(known.get((kind.name, fraction, change), {"computed": []})["computed"]) == order
            ]
            if not missing:
                continue
            trace = kind.order(order)
            base: dict[float, float] = {}
            for fraction, change in missing:
                rate = hit_rate(trace, fraction, CHANGES[change])
                if change == AS_IT_IS:
                    base[fraction] = rate
                key = kind.name, fraction, change
                if key not in known:
                    known[key] = {"traffic": kind.name, "capacity": fraction, "change": change}
                    known[key] |= {"computed": [], "hit_rates": []}
                    rows.append(known[key])
                known[key]["computed"].append(round((1 - rate) / (1 - base[fraction]), 6))
                known[key]["hit_rates"].append(round(rate, 6))
            write_results("estimator", rows + pooled(rows), out=out)
    print_rows("Computed blocks over those of the estimator as it is", pooled(rows))
    typer.echo(f"written to {out}")


if __name__ == "__main__":
    typer.run(main)
