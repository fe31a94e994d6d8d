"""G: gain of the importance factor in eviction, over g = 1 and over g given to the wrong nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sgl_importance_lab.study.recording import Query, Recording
from sgl_importance_lab.study.statistics import Estimate, Floats, bootstrap
from sgl_importance_lab.study.study_report import OF_THESE_MODELS, Finding, draw, verdict_of

FRACTIONS = (0.05, 0.1, 0.2, 0.4)
ARMS = ("lru", "ours", "g1", "shuffled")
BLOCKS = 20  # consecutive requests depend on each other: resampled together
CLAIM = "importance in the eviction order raises the prefix hit rate over the same policy with g = 1"


@dataclass(frozen=True, slots=True)
class Replayed:
    """Every arm on one recording at one capacity.

    Attributes:
        hits: cached prompt tokens of each request, by arm.
    """

    recording: Recording
    fraction: float
    capacity_pages: int
    hits: Mapping[str, Sequence[int]]


def paired_blocks(queries: Sequence[Query], left: Sequence[int], right: Sequence[int]) -> Floats:
    """Units of the bootstrap: hits of the one, of the other, prompt tokens; float64 [blocks, 3]."""
    table = np.array(
        [(a, b, query.input_tokens) for query, a, b in zip(queries, left, right, strict=True)], dtype=float
    )
    parts = np.array_split(table, min(BLOCKS, len(table)))
    return np.array([part.sum(axis=0) for part in parts])


def rate_difference(blocks: Floats) -> Estimate:
    """Token hit rate of the first minus that of the second, with its interval over blocks."""
    return bootstrap(blocks, lambda table: float((table[:, 0] - table[:, 1]).sum() / table[:, 2].sum()))


def _rows(replayed: Replayed) -> list[dict[str, Any]]:
    queries = replayed.recording.queries
    kinds = [kind for kind, count in sorted(Counter(q.kind for q in queries).items()) if count >= BLOCKS]
    rows = []
    for kind in ["all", *kinds] if len(kinds) > 1 else ["all"]:
        chosen = [i for i, query in enumerate(queries) if kind in ("all", query.kind)]
        members = [queries[i] for i in chosen]
        tokens = sum(query.input_tokens for query in members)
        hits = {arm: [values[i] for i in chosen] for arm, values in replayed.hits.items()}
        gain = rate_difference(paired_blocks(members, hits["ours"], hits["g1"]))
        over_shuffled = rate_difference(paired_blocks(members, hits["ours"], hits["shuffled"]))
        rows.append(
            {
                "recording": replayed.recording.name,
                "workload": kind,
                "capacity": replayed.fraction,
                "pages": replayed.capacity_pages,
                "requests": len(members),
                **{arm: sum(hits[arm]) / tokens for arm in ARMS},
                "ours-g1": gain.value,
                "low": gain.low,
                "high": gain.high,
                "ours-shuffled": over_shuffled.value,
                "low_s": over_shuffled.low,
                "high_s": over_shuffled.high,
            }
        )
    return rows


def server_notes(recordings: Sequence[Recording]) -> list[str]:
    """Compares the hits of servers that ran our policy with g and without, request by request."""
    arms = [recording for recording in recordings if recording.header.options["policy"] == "importance"]
    notes = []
    for recording in arms:
        tokens = sum(query.input_tokens for query in recording.queries)
        hits = sum(query.cached_tokens for query in recording.queries)
        notes.append(
            f"server {recording.name}: g {recording.header.options['g']}, "
            f"{recording.header.capacity_tokens.get('device', 0)} device tokens, token hit rate "
            f"{hits / max(1, tokens):.4f}"
        )
    for on in arms:
        for off in arms:
            if (on.header.options["g"], off.header.options["g"]) == ("on", "off"):
                notes += _paired(on, off)
    return notes


def _paired(on: Recording, off: Recording) -> list[str]:
    control = {query.rid: query.cached_tokens for query in off.queries}
    both = [query for query in on.queries if query.rid in control]
    if not both:
        return []
    hits = [query.cached_tokens for query in both]
    difference = rate_difference(paired_blocks(both, hits, [control[query.rid] for query in both]))
    return [f"servers, {len(both)} requests that both had: {on.name} minus {off.name} {difference}"]


def conclude(
    replayed: Sequence[Replayed],
    *,
    servers: Sequence[str] = (),
    checks: Sequence[str] = (),
    figure: Path | None = None,
) -> Finding:
    """The finding over all recordings and capacities.

    Args:
        replayed: every arm at every capacity.
        servers: ``server_notes``.
        checks: of the replay against the servers that recorded: one note each.
        figure: file to draw into.
    """
    rows = [row for one in replayed for row in _rows(one)]
    value = rate_difference(_blocks_against(replayed, "g1"))
    control = rate_difference(_blocks_against(replayed, "shuffled"))
    verdict = verdict_of(
        value,
        positive="supported on these recordings",
        negative="refuted on these recordings: g = 1 evicts better",
        undecided="undecided: the interval holds 0, so g should ship off",
    )
    if value.low > 0 and control.low <= 0:
        verdict = "not supported: shuffled factors do as well, so the gain is not importance"
    if figure is not None:
        names = list(dict.fromkeys(one.recording.name for one in replayed))
        draw(figure, [(f"{name}: token hit rate", _painter(rows, name)) for name in names])
    return Finding(
        study="g",
        claim=CLAIM,
        value=value,
        verdict=verdict,
        notes=(
            f"value: token hit rate of ours minus g = 1 over all recordings and capacities; ours minus "
            f"shuffled: {control}; {BLOCKS} blocks of neighbouring requests are the resampled units",
            "replayed one request after the other through the real tree, device tier only, whole nodes as "
            "the server evicts them; the difference lies in the eviction order, the only thing that differs",
            *checks,
            *servers,
            "pins, pre-warming and the gate of lower tiers are no part of it: nothing is said of them",
            OF_THESE_MODELS,
        ),
        rows=tuple(rows),
    )


def _blocks_against(replayed: Sequence[Replayed], arm: str) -> Floats:
    """Blocks of every recording, each once: its capacities replay the same requests, and are no new units."""
    of_recording: dict[int, list[Floats]] = {}
    for one in replayed:
        blocks = paired_blocks(one.recording.queries, one.hits["ours"], one.hits[arm])
        of_recording.setdefault(id(one.recording), []).append(blocks)
    return np.concatenate([np.sum(capacities, axis=0) for capacities in of_recording.values()])


def _painter(rows: Sequence[dict[str, Any]], name: str) -> Any:
    def paint(axis: Any) -> None:
        mine = [row for row in rows if row["recording"] == name and row["workload"] == "all"]
        for arm, style in zip(ARMS, ("x:", "o-", "s--", "^:"), strict=True):
            axis.plot([row["capacity"] for row in mine], [row[arm] for row in mine], style, label=arm)
        axis.set_xlabel("capacity, share of unique pages")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)

    return paint
