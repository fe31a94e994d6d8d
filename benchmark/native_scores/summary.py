"""What all judged windows say, with intervals over windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmark.native_scores.training import Trained
from benchmark.sparse.real.summary import KINDS
from sgl_importance_lab.selectors.registry import ALL_SELECTORS
from sgl_importance_lab.study.statistics import Estimate, mean_of, ratio_of
from sgl_importance_lab.trained_model.decoder_shape import Shape

PAGE, BF16_BYTES, UNIT_BYTES = 16, 2, 4
POST_HOC = ("mass", "peak")
CLAIMED = 0.80
"""H4: what placement by post-hoc scores keeps of the hit rate of placement by native ones."""
LEAST_WINDOWS = 12

Rows = Sequence[Mapping[str, Any]]


def token_bytes(arm: str, trained: Mapping[str, Trained], shape: Shape) -> float:
    """What a selector keeps of a token in a layer; 0 where it reads every key, or nothing."""
    name = arm.partition("/")[0]
    if name in trained:
        return trained[name].shape.key_bytes
    if name not in ALL_SELECTORS:
        return 0
    kept = ALL_SELECTORS[name](PAGE).kept_bytes(shape.dim)
    return (kept + UNIT_BYTES) * shape.kv_heads / PAGE if kept else 0


def selector_rows(rows: Rows, trained: Mapping[str, Trained], shape: Shape) -> list[dict[str, Any]]:
    """One row for each selector and group of windows: all, and those of kinds seen in training or not."""
    of_arms = _by_arm(rows, "selector")
    kv_bytes = 2 * shape.kv_heads * shape.dim * BF16_BYTES
    found = []
    for arm, windows in of_arms.items():
        kept = token_bytes(arm, trained, shape)
        for group in ("all", "seen", "unseen"):
            own = {at: row for at, row in windows.items() if group in ("all", _group(row))}
            if not own:
                continue
            row: dict[str, Any] = {"table": "selectors", "arm": arm, "group": group, "windows": len(own)}
            row |= {"bytes": kept, "of_kv": kept / kv_bytes}
            for kind in KINDS:
                row[kind] = asdict(mean_of([one[kind] for one in own.values()]))
                for other in ("oracle", "bits"):
                    pairs = [
                        (one[kind], of_arms[other][at][kind])
                        for at, one in own.items()
                        if at in of_arms.get(other, {})
                    ]
                    if pairs:
                        row[f"{kind}_of_{other}"] = asdict(ratio_of(pairs))
            row["records"] = sum(sum(one["exact"]) for one in own.values())
            row["records_kept"] = sum(
                both for one in own.values() for both in map(min, one["exact"], one["kept"])
            )
            found.append(row)
    return found


def placement_rows(rows: Rows) -> list[dict[str, Any]]:
    """One row for each indexer, producer, grain and reader: its hit rate, alone and over the native one's."""
    found = []
    for arm, windows in _by_arm(rows, "placement").items():
        counts = [{tuple(count[:3]): count[3:] for count in row["counts"]} for row in windows.values()]
        for producer, grain, reader in counts[0]:
            of_windows = [one[producer, grain, reader] for one in counts]
            row = {
                "table": "placement",
                "indexer": arm,
                "producer": producer,
                "grain": grain,
                "reader": reader,
            }
            row |= {"windows": len(counts), "hit_rate": asdict(ratio_of(of_windows))}
            if arm:
                native = [one["native", grain, reader][0] for one in counts]
                hits = [own for own, _ in of_windows]
                ratio = ratio_of(list(zip(hits, native, strict=True)))
                row["of_native"] = asdict(ratio)
                if producer in POST_HOC:
                    row["verdict"] = verdict(ratio)
            found.append(row)
    return found


def verdict(ratio: Estimate) -> str:
    """Whether post-hoc placement keeps H4's share of native placement's hits."""
    if ratio.n < LEAST_WINDOWS:
        return f"none: {ratio.n} windows, {LEAST_WINDOWS} are needed"
    if ratio.low >= CLAIMED:
        return "supported"
    return "refuted" if ratio.high < CLAIMED else "undecided"


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a table at the terminal."""
    return {
        name: f"{value['value']:.3f} ({value['low']:.3f}-{value['high']:.3f})"
        if isinstance(value, dict)
        else value
        for name, value in row.items()
        if name != "table"
    }


def _group(row: Mapping[str, Any]) -> str:
    return "unseen" if row["unseen"] else "seen"


def _by_arm(rows: Rows, measure: str) -> dict[str, dict[tuple[Any, ...], Mapping[str, Any]]]:
    found: dict[str, dict[tuple[Any, ...], Mapping[str, Any]]] = {}
    for row in rows:
        if row["measure"] == measure:
            at = (row["source"], row["number"], row["tokens"])
            found.setdefault(row["arm"], {})[at] = row
    return found
