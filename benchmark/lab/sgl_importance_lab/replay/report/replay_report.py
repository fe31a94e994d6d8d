"""The table of a replay, with the capacity that LRU would need for the same hits."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from sgl_importance.terminal import add_texts, plain
from sgl_importance_lab.replay.replay_runner import ReplayMode, Row
from sgl_importance_lab.replay.trace import Trace

_COLUMNS = (
    ("blocks", 7),
    ("of unique", 6),
    ("block hits", 6),
    ("token hits", 6),
    ("full hits", 6),
    ("LRU needs", 7),
    ("", 6),
    ("s", 5),
)
"""Titles and widths: 80 columns are enough below a million blocks."""


def results_table(trace: Trace, rows: Sequence[Row], mode: ReplayMode) -> Table:
    """One line per row of the trace; "LRU needs" evicts single blocks in node-granular replay too."""
    from sgl_importance_lab.replay.equivalent import lru_curve  # imports numba

    curve = lru_curve(trace, object_level=mode is ReplayMode.OBJECTS)
    table = Table(
        Column("policy", min_width=10),
        box=SIMPLE_HEAD,
        pad_edge=False,
        title=plain(
            f"{trace.name}: {trace.num_requests:,} requests, {trace.num_accesses:,} block accesses, "
            f"{trace.num_blocks:,} unique blocks of {trace.block_tokens} tokens",
            "table.title",
        ),
        caption="LRU needs: blocks with which LRU hits as much"
        + ", evicting single blocks" * (mode is ReplayMode.NODES)
        + _refusals(trace, rows),
    )
    for title, width in _COLUMNS:
        table.add_column(title, justify="right", min_width=width)
    for row in rows:
        needed = curve.capacity_for(row.hit_blocks)
        add_texts(
            table,
            row.policy,
            f"{row.capacity_blocks:,}",
            f"{row.capacity_blocks / trace.num_blocks:.1%}",
            f"{row.block_hit_rate:.4f}",
            f"{row.token_hit_rate:.4f}",
            f"{row.full_hit_rate:.4f}",
            "never" if needed is None else f"{needed:,}",
            "" if needed is None else f"{needed / row.capacity_blocks:.2f}x",
            f"{row.seconds:.2f}",
        )
    return table


def _refusals(trace: Trace, rows: Sequence[Row]) -> str:
    """What a server would refuse, by capacity; rates leave those requests out."""
    refused = {row.capacity_blocks: row.refused_requests for row in rows if row.refused_requests}
    if not refused:
        return ""
    sizes = ", ".join(f"{count:,} at {capacity:,} blocks" for capacity, count in sorted(refused.items()))
    return f"\nRefused, as longer than the cache, and in no rate: {sizes}, of {trace.num_requests:,} requests"
