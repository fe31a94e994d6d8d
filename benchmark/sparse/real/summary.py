"""What all windows say of each arm, beside ``oracle`` of the same grain on the same windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sgl_importance_lab.study.statistics import mean_of, ratio_of

KINDS = ("quoted", "plain", "record")
WINDOW = ("tokens", "source", "number")
ARM = ("tokens", "layout", "share", "selector", "grain")
ORACLE = "oracle"


def summaries(
    rows: Sequence[Mapping[str, Any]], kept_bytes: Mapping[str, int], kv_bytes: int
) -> list[dict[str, Any]]:
    """One row for each length, layout, share, selector and grain.

    Args:
        rows: of single windows, as ``arm_row`` makes them.
        kept_bytes: what each selector keeps of a page for one KV head.
        kv_bytes: keys and values of a page for one KV head, in bf16.
    """
    found = []
    for key in dict.fromkeys(tuple(row[name] for name in ARM) for row in rows):
        arm = dict(zip(ARM, key, strict=True))
        selector = arm["selector"]
        of_arm, of_oracle = (_by_window(rows, arm | {"selector": name}) for name in (selector, ORACLE))
        both = [window for window in of_arm if window in of_oracle]
        kept = kept_bytes[selector]
        summary: dict[str, Any] = dict(arm)
        summary |= {"windows": len(of_arm), "bytes": kept, "of_kv": kept / kv_bytes}
        for kind in KINDS:
            pairs = [(of_arm[window][kind], of_oracle[window][kind]) for window in both]
            summary[kind] = asdict(mean_of([row[kind] for row in of_arm.values()]))
            if pairs:
                summary[f"{kind}_minus_oracle"] = asdict(mean_of([own - best for own, best in pairs]))
                summary[f"{kind}_of_oracle"] = asdict(ratio_of(pairs))
        summary["records"] = sum(map(sum, (row["exact"] for row in of_arm.values())))
        summary["records_kept"] = sum(map(_kept, of_arm.values()))
        summary["records_oracle_keeps"] = sum(_kept(of_oracle[window]) for window in both)
        pages = sum(row["pages"] for row in of_arm.values())
        for name in ("chosen", "union", "fresh"):
            summary[name] = sum(row[name] for row in of_arm.values()) / pages
        found.append(summary)
    return found


def shown(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary as a row of a table at the terminal."""
    names = (*ARM, "windows", "bytes")
    of_kinds = {
        kind: f"{summary[kind]['value']:.3f} ({summary[kind]['low']:.3f}-{summary[kind]['high']:.3f})"
        for kind in KINDS
    }
    of_oracle = {
        f"{kind}/oracle": f"{summary[f'{kind}_of_oracle']['value']:.2f}"
        for kind in KINDS
        if f"{kind}_of_oracle" in summary
    }
    records = f"{summary['records_kept']} of {summary['records']}"
    read = {name: summary[name] for name in ("chosen", "union", "fresh")}
    return {name: summary[name] for name in names} | of_kinds | of_oracle | {"records": records} | read


def _by_window(
    rows: Sequence[Mapping[str, Any]], arm: Mapping[str, Any]
) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    return {
        tuple(row[name] for name in WINDOW): row
        for row in rows
        if all(row[name] == value for name, value in arm.items())
    }


def _kept(row: Mapping[str, Any]) -> int:
    """Records that exact attention finds and the arm, too."""
    return sum(exact and kept for exact, kept in zip(row["exact"], row["kept"], strict=True))
