"""Tables of KV heads apart, made of ``benchmark/results/findings/heads``."""

from __future__ import annotations

from typing import Any

from benchmark.serving.measured import table
from scripts.rendering.figures import results

SINGLE_HEADS, WHOLE_PAGES = "each head, single heads", "each head, whole pages"
LAYER_CHOICE, SAME_ATTENTION = "the layer, whole pages", "the layer, same attention"
KEPT, RULE, PAGE, BUFFER = 0.2, "EMA", 16, 0.05
RULE_NAMES = {"EMA": "EMA of attention (importance)", "oracle": "optimum"}
KINDS = ("thought", "decode")


def _finding(name: str) -> dict[str, Any]:
    found: dict[str, Any] = results(f"findings/heads/heads-{name}")
    return found


def heads_verdict(name: str) -> str:
    """The verdict on residency or prefetch."""
    return str(_finding(name)["verdict"])


def heads_note(begins: str) -> str:
    """What a note of the finding on residency says behind its beginning."""
    return next(
        note.removeprefix(begins) for note in _finding("residency")["notes"] if note.startswith(begins)
    )


def _units(kind: str, page: int = PAGE) -> dict[tuple[str, float], dict[str, Any]]:
    return {
        (row["units"], row["kept"]): row
        for row in _finding("residency")["rows"]
        if (row["kind"], row["page"], row["rule"]) == (kind, page, RULE)
    }


def heads_units_table() -> str:
    """Bytes, copies and waits of each way to choose pages and to move them."""
    rows = []
    for kind in KINDS:
        found = _units(kind)
        kept = sorted({share for _, share in found})
        for units in (SINGLE_HEADS, WHOLE_PAGES, LAYER_CHOICE, SAME_ATTENTION):
            row = found[units, KEPT]
            rows.append(
                [
                    kind,
                    units,
                    f"{row['covered']:.3f}",
                    *(f"{found[units, share]['moved KiB']:.0f}" for share in kept),
                    f"{row['copies']:.1f}",
                    f"{row['us, one gather a layer']:.1f}",
                    f"{row['us, copy by copy']:.0f}",
                    f"{row['us, from flash']:.0f}",
                ]
            )
    return table(
        [
            "",
            "who chooses, what moves",
            "attention read",
            *(f"KiB, room for {share:.0%}" for share in kept),
            "copies",
            "us, one gather",
            "us, copy by copy",
            "us, from flash",
        ],
        rows,
    )


def heads_ratio_table() -> str:
    """Bytes of single heads as a part of whole pages', by rule and room."""
    found = {
        (row["rule"], row["kind"], row["kept"]): row["bytes of whole pages"]
        for row in _finding("residency")["rows"]
        if row["units"] == SINGLE_HEADS and row["page"] == PAGE
    }
    cells = [(kind, share) for kind in KINDS for share in sorted({share for _, _, share in found})]
    return table(
        ["rule", *(f"{kind}, room for {share:.0%}" for kind, share in cells)],
        [
            [RULE_NAMES.get(rule, rule), *(f"{found[rule, kind, share]:.2f}" for kind, share in cells)]
            for rule in dict.fromkeys(rule for rule, _, _ in found)
        ],
    )


def heads_widest_interval() -> str:
    """Of the numbers in ``heads_ratio_table``, from the lower to the upper end."""
    rows = [
        row for row in _finding("residency")["rows"] if (row["units"], row["page"]) == (SINGLE_HEADS, PAGE)
    ]
    return f"{max(row['high'] - row['low'] for row in rows):.2f}"


def heads_small_pages(kind: str) -> str:
    """Bytes of single heads as a part of whole pages', with pages of 1 and 4 tokens."""
    rows = [_units(kind, page)[SINGLE_HEADS, KEPT]["bytes of whole pages"] for page in (1, 4)]
    return f"{min(rows):.2f} to {max(rows):.2f}"


def heads_beside(units: str, kind: str, measure: str = "moved KiB") -> str:
    """Single heads as a part of another way to choose and to move: bytes, or another column."""
    found = _units(kind)
    return f"{found[SINGLE_HEADS, KEPT][measure] / found[units, KEPT][measure]:.2f}"


def _prefetched(kind: str, kept: float = KEPT) -> dict[str, dict[str, Any]]:
    return {
        row["prefetcher"]: row
        for row in _finding("prefetch")["rows"]
        if (row["kind"], row["page"], row["kept"], row["buffer"]) == (kind, PAGE, kept, BUFFER)
    }


def _interval(row: dict[str, Any], *names: str) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*(row[name] for name in names))


def heads_prefetch_table() -> str:
    """What each prefetcher saves and wastes."""
    names = ("random", "next page", "EMA", "milestone", "profile", "profile of the answer", "oracle")
    return table(
        [
            "",
            "fetched ahead",
            "wait saved, one gather",
            "wait saved, copy by copy",
            "copied ahead",
            "of these for nothing",
        ],
        [
            [
                kind,
                name,
                _interval(row, "wait saved, gather", "low", "high"),
                _interval(row, "wait saved, copies", "copies low", "copies high"),
                f"{row['fetched']:.2f}",
                f"{row['unread']:.2f}",
            ]
            for kind in KINDS
            for name in names
            if (row := _prefetched(kind).get(name)) is not None
        ],
    )


def heads_wait_saved(name: str, kind: str, kept: float = KEPT) -> str:
    """Share of the wait that a prefetcher saves, one gather a layer."""
    return _interval(_prefetched(kind, kept)[name], "wait saved, gather", "low", "high")
