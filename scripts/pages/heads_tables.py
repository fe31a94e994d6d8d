"""Tables of KV heads apart, made of ``benchmark/results/findings/heads``."""

from __future__ import annotations

from typing import Any

from benchmark.serving.measured import table
from scripts.pages.figures import results
from sgl_importance.study.heads.choices import LAYER_CHOICE, SAME_ATTENTION, SINGLE_HEADS, WHOLE_PAGES

KEPT, RULE = 0.2, "EMA"
KINDS = ("thought", "decode")


def _finding(name: str) -> dict[str, Any]:
    found: dict[str, Any] = results(f"findings/heads/heads-{name}")
    return found


def heads_verdict(name: str) -> str:
    """The verdict on residency or prefetch."""
    return str(_finding(name)["verdict"])


def heads_note(name: str, number: int = 0) -> str:
    return str(_finding(name)["notes"][number])


def _units(kind: str, page: int = 16, rule: str = RULE) -> dict[tuple[str, float], dict[str, Any]]:
    return {
        (row["units"], row["kept"]): row
        for row in _finding("residency")["rows"]
        if (row["kind"], row["page"], row["rule"]) == (kind, page, rule)
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
    """Bytes of single heads as a part of whole pages', by rule, page and room."""
    rows = [row for row in _finding("residency")["rows"] if row["units"] == SINGLE_HEADS]
    shares = sorted({row["kept"] for row in rows})
    found = {(row["kind"], row["page"], row["rule"], row["kept"]): row for row in rows}
    return table(
        ["", "pages of", "rule", *(f"room for {share:.0%}" for share in shares)],
        [
            [
                kind,
                str(page),
                rule,
                *(
                    "{:.2f} ({:.2f} to {:.2f})".format(
                        *(
                            found[kind, page, rule, share][name]
                            for name in ("bytes of whole pages", "low", "high")
                        )
                    )
                    for share in shares
                ),
            ]
            for kind in KINDS
            for page in sorted({row["page"] for row in rows}, reverse=True)
            for rule in dict.fromkeys(row["rule"] for row in rows)
            if page == 16 or rule == RULE
        ],
    )


def heads_of_whole_pages(measure: str, kind: str, kept: float = KEPT) -> str:
    """Bytes (``bytes``) or waits (``gather``, ``copies``) of single heads as a part of whole pages'."""
    row = _units(kind)[SINGLE_HEADS, kept]
    names = {
        "bytes": ("bytes of whole pages", "low", "high"),
        "gather": ("wait of whole pages, gather", "gather low", "gather high"),
        "copies": ("wait of whole pages, copies", "copies low", "copies high"),
    }[measure]
    return "{:.2f} ({:.2f} to {:.2f})".format(*(row[name] for name in names))


def heads_beside(units: str, kind: str, kept: float = KEPT) -> str:
    """Bytes of single heads as a part of those of another way."""
    found = _units(kind)
    return f"{found[SINGLE_HEADS, kept]['moved KiB'] / found[units, kept]['moved KiB']:.2f}"


def _prefetched(kind: str, page: int = 16, kept: float = KEPT) -> dict[tuple[str, float], dict[str, Any]]:
    return {
        (row["prefetcher"], row["buffer"]): row
        for row in _finding("prefetch")["rows"]
        if (row["kind"], row["page"], row["kept"]) == (kind, page, kept)
    }


def heads_prefetch_table() -> str:
    """What each prefetcher saves and wastes."""
    names = ("random", "next page", "EMA", "milestone", "profile", "profile of the answer", "oracle")
    rows = []
    for kind in KINDS:
        found = _prefetched(kind)
        for name in names:
            for (prefetcher, buffer), row in found.items():
                if prefetcher == name:
                    rows.append(
                        [
                            kind,
                            name,
                            f"{buffer:.0%}",
                            "{:.2f} ({:.2f} to {:.2f})".format(
                                *(row[each] for each in ("wait saved, gather", "low", "high"))
                            ),
                            "{:.2f} ({:.2f} to {:.2f})".format(
                                *(row[each] for each in ("wait saved, copies", "copies low", "copies high"))
                            ),
                            f"{row['fetched']:.2f}",
                            f"{row['unread']:.2f}",
                        ]
                    )
    return table(
        [
            "",
            "fetched ahead",
            "buffer",
            "wait saved, one gather",
            "wait saved, copy by copy",
            "copied ahead",
            "of these for nothing",
        ],
        rows,
    )


def heads_wait_saved(name: str, kind: str, *, kept: float = KEPT, page: int = 16) -> str:
    """Share of the wait that a prefetcher saves, one gather a layer, with the buffer that suits it."""
    rows = [row for (each, _), row in _prefetched(kind, page, kept).items() if each == name]
    best = max(rows, key=lambda row: row["wait saved, gather"])
    return "{:.2f} ({:.2f} to {:.2f})".format(*(best[each] for each in ("wait saved, gather", "low", "high")))
