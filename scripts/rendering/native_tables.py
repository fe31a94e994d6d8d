"""Scores of trained indexers beside those taken from attention, made of ``benchmark/results``."""

from __future__ import annotations

from typing import Any

from benchmark.serving.measured import table as _table
from scripts.rendering.cells import interval as _interval
from scripts.rendering.figures import results

_PRODUCERS = {
    "native": "native: the indexer",
    "mass": "post hoc: mass",
    "peak": "post hoc: peak",
    "quest": "Quest's bound",
    "blasst": "BLASST: local minus running maximum",
    "newest": "control: the newest pages",
    "shuffled": "control: mass, shuffled",
    "uniform": "control: uniform",
    "future": "mass of the queries that read",
}


def _rows(table: str) -> list[dict[str, Any]]:
    return [row for row in results("native_scores")["rows"] if row.get("table") == table]


def _ratio(row: dict[str, Any], name: str) -> str:
    return _interval(row[name], "value") if name in row else "-"


def native_windows(table: str) -> str:
    """How many stretches of text a table rests on."""
    return str(max(row["windows"] for row in _rows(table)))


def _placement(producer: str, grain: str, reader: str, indexer: str) -> dict[str, Any]:
    wanted = (producer, grain, reader, indexer)
    names = ("producer", "grain", "reader", "indexer")
    return next(row for row in _rows("placement") if tuple(row[name] for name in names) == wanted)


def native_placement_table(indexer: str = "dim32") -> str:
    """Hit rates of placement by each producer, where pages are read by exact attention and by the indexer."""
    lines = []
    for producer, title in _PRODUCERS.items():
        cells = [
            _interval(_placement(producer, grain, reader, indexer)["hit_rate"], "value", form=".3f")
            for reader in ("exact", "native")
            for grain in ("layer", "model")
        ]
        lines.append([title, *cells])
    titles = [f"{reader}, {grain}" for reader in ("exact", "indexer") for grain in ("layer", "whole page")]
    return _table(["placed by", *titles], lines)


def native_h4(producer: str, grain: str = "layer", reader: str = "exact", indexer: str = "dim32") -> str:
    """Hit rate of placement by a producer over that of placement by native scores."""
    return _ratio(_placement(producer, grain, reader, indexer), "of_native")


def native_hit_rate(producer: str) -> float:
    """Where layers place alone and exact attention reads."""
    return float(_placement(producer, "layer", "exact", "dim32")["hit_rate"]["value"])


def native_verdicts_table(indexer: str = "dim32") -> str:
    """Post-hoc placement over native placement, and what that says of H4, in all four readings."""
    lines = []
    for reader in ("exact", "native"):
        for grain, title in (("layer", "by layer"), ("model", "whole pages")):
            cells = []
            for producer in ("mass", "peak"):
                row = _placement(producer, grain, reader, indexer)
                cells.append(f"{_ratio(row, 'of_native')}: {row['verdict']}")
            lines.append(["exact attention" if reader == "exact" else "the indexer", title, *cells])
    return _table(["read by", "placed", "mass / native", "peak / native"], lines)


_SELECTORS = {"oracle": "every exact key", "bits": "`bits`", "dim32/sum": "the indexer"}


def _selector(arm: str) -> dict[str, Any]:
    return next(row for row in _rows("selectors") if (row["arm"], row["group"]) == (arm, "all"))


def native_selector_table() -> str:
    """Divergence from exact attention where ten layers read a tenth of their pages, by who chooses these."""
    lines = []
    for arm, title in _SELECTORS.items():
        row = _selector(arm)
        cells = [_interval(row[text], "value", form=".3f") for text in ("plain", "quoted", "record")]
        kept = f"{row['records_kept']} of {row['records']}"
        lines.append([title, f"{row['bytes']:.0f}" if row["bytes"] else "-", *cells, kept])
    titles = ["ordinary text", "a quoted passage", "a planted record", "records kept"]
    return _table(["chosen by", "bytes a token and layer", *titles], lines)


def native_over_bits(text: str) -> str:
    """Divergence of the indexer's choice over that of ``bits``, on a kind of question."""
    return _interval(_selector("dim32/sum")[f"{text}_of_bits"], "value", form=".0f")


def native_training(what: str, indexer: str = "dim32") -> str:
    """Of an indexer's training: ``passages``, ``tokens`` in all, ``steps``, or ``kl`` before and after."""
    report = next(row for row in _rows("training") if row["name"] == indexer)
    layers = report["layers"]
    before, after = (sum(row[at] for row in layers) / len(layers) for at in ("before", "after"))
    told = {
        "passages": str(len(report["passages"])),
        "tokens": f"{len(report['passages']) * report['tokens']:,}",
        "steps": str(report["steps"]),
        "kl": f"{before:.2f} to {after:.2f}",
        "cpu": f"{sum(row['cpu_seconds'] for row in layers) / 60:.1f}",
    }
    return told[what]
