"""Tables of answers that are written while KV is let go or quantised, and of rules that learn."""

from __future__ import annotations

from typing import Any

from benchmark.serving.measured import table
from scripts.rendering.figures import results
from sgl_importance_lab.study.statistics import mean_of
from sgl_importance_lab.study.thinking.measured import WANTED_SHARE

KINDS = ("thought", "decode")
SWAP_IN_MILLISECONDS = (0.1, 1, 10)


def _evictions(page: int = 16) -> dict[tuple[str, str, float], dict[str, Any]]:
    rows = results("thought_evictions")["rows"]
    return {(row["kind"], row["rule"], row["kept"]): row for row in rows if row["page"] == page}


def evictions_table() -> str:
    """Right answers, and the share before the first wrong token, by rule and share of the context kept."""
    found = _evictions()
    shares = sorted({kept for _, _, kept in found if kept < 1})
    rules = list(dict.fromkeys(rule for _, rule, kept in found if kept < 1))
    return table(
        ["rule", *(f"{kind}, {share:.0%} kept" for kind in KINDS for share in shares)],
        [
            [
                rule,
                *(
                    "{right:.2f} ({right before:.2f})".format(**found[kind, rule, share])
                    for kind in KINDS
                    for share in shares
                ),
            ]
            for rule in rules
        ],
    )


def eviction_row(kind: str, rule: str, kept: float) -> str:
    """Share of an answer before its first wrong token, with its interval."""
    return "{right before:.2f} ({low:.2f} to {high:.2f})".format(**_evictions()[kind, rule, kept])


def eviction_counts() -> str:
    """How many answers of each kind."""
    found = _evictions()
    asked = {kind: found[kind, "everything kept", 1.0] for kind in KINDS}
    return ", ".join(
        f"{round(row['right'] * row['n'])} of {row['n']} are right without eviction ({kind})"
        for kind, row in asked.items()
    )


def wrong_evictions_table() -> str:
    """Right answers behind pages that are taken away once."""
    rows = {(row["kind"], row["pages"], row["which"]): row for row in results("wrong_evictions")["rows"]}
    counts = sorted({pages for _, pages, _ in rows})
    return table(
        ["", "pages of each head", "answers", "wanted within 5 steps", "not wanted"],
        [
            [
                kind,
                str(count),
                str(rows[kind, count, "wrong"]["n"]),
                *(
                    "{right:.2f} ({low:.2f} to {high:.2f})".format(**rows[kind, count, which])
                    for which in ("wrong", "right")
                ),
            ]
            for kind in KINDS
            for count in counts
        ],
    )


def demotion_table() -> str:
    """Right thoughts, the share before the first wrong token and bytes, by bits and what is spared."""
    rows = {(row["bits"], row["arm"]): row for row in results("thought_demotion")["rows"]}
    arms = list(dict.fromkeys(arm for _, arm in rows))

    def cell(row: dict[str, Any]) -> str:
        size = "" if row["bytes"] is None else f", {row['bytes']:.2f} of the bytes"
        return f"{row['right']:.2f} ({row['right before']:.2f}){size}"

    return table(
        ["bits", "thoughts", *arms],
        [
            [
                str(bits),
                str(rows[bits, arms[0]]["n"]),
                *(cell(rows[bits, arm]) if (bits, arm) in rows else "" for arm in arms),
            ]
            for bits in sorted({bits for bits, _ in rows}, reverse=True)
        ],
    )


def milestones_spared(bits: int, beside: str) -> str:
    """More thoughts right to the end where milestones stay whole than in another arm, paired."""
    rows = {
        (row["bits"], row["arm"]): row["by thought"]
        for row in results("thought_demotion")["rows"]
        if row["bits"] == bits
    }
    pairs = zip(rows[bits, "milestones whole"], rows[bits, beside], strict=True)
    more = mean_of([float(spared == 1) - float(other == 1) for spared, other in pairs])
    return f"{more.value:.2f} ({more.low:.2f} to {more.high:.2f})"


def predictors_table() -> str:
    """Loads and processor time of rules that learn."""
    return table(
        ["rule", "loaded of wanted", "fewer than EMA", "us a step"],
        [
            [
                row["rule"],
                f"{row['loaded']:.3f}",
                "{fewer than EMA:.3f} ({low:.3f} to {high:.3f})".format(**row),
                f"{row['us per step']:,.0f}",
            ]
            for row in results("thought_predictors")["rows"]
        ],
    )


def _predictor(begin: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = results("thought_predictors")["rows"]
    return next(row for row in reversed(found) if row["rule"].startswith(begin))


def trees_fewer_than(rule: str) -> str:
    """Share of another rule's loads that trees save, of the same thoughts with room for a fifth."""
    (loaded,) = (
        row["loaded"]
        for row in results("findings/thinking/thinking-residency")["rows"]
        if (row["page"], row["scope"], row["kept"], row["rule"]) == (16, "context", 0.2, rule)
    )
    return f"{1 - _predictor('trees')['loaded'] / loaded:.1%}"


def trees_save_loads() -> str:
    """Loads of a page's head that trees save beside EMA in a step, and what their scores take."""
    trees, ema = _predictor("trees"), _predictor("EMA")
    wanted = WANTED_SHARE * trees["pages per step"] * trees["heads"]
    saved = wanted * (ema["loaded"] - trees["loaded"])
    return f"{saved:.1f} loads a step and takes {trees['us per step']:,.0f} us"


def milestone_prefetch_table() -> str:
    """What fetching behind milestones saves and wastes in thoughts, and what a token then waits."""
    rows = {
        row["prefetcher"]: row
        for row in results("findings/heads/heads-prefetch")["rows"]
        if (row["page"], row["kind"], row["kept"]) == (16, "thought", 0.2) and row["buffer"] in (0, 0.05)
    }

    def waits(swap_ins: float) -> str:
        return " / ".join(f"{swap_ins * milliseconds:.3g}" for milliseconds in SWAP_IN_MILLISECONDS)

    at = " / ".join(f"{milliseconds:g}" for milliseconds in SWAP_IN_MILLISECONDS)
    return table(
        [
            *("fetched ahead", "copies that were read", "stalls saved, one swap-in a layer"),
            *(f"ms a token at {at} ms", "stalls saved, a swap-in a page", f"ms a token at {at} ms"),
        ],
        [
            [
                name,
                f"{1 - row['unread'] / row['fetched']:.2f}" if row["fetched"] else "",
                f"{row['wait saved, gather']:.2f}",
                waits(row["swap-ins a token"]),
                f"{row['wait saved, copies']:.2f}",
                waits(row["loads a token"]),
            ]
            for name, row in rows.items()
        ],
    )
