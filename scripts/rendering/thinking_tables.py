"""Tables of what long thoughts want, made of ``benchmark/results/findings/thinking``."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmark.serving.measured import table
from scripts.rendering.figures import results
from sgl_importance_lab.study.thinking.page_features import PAGE_FEATURES

KEPT = 0.2
KINDS = ("thought", "decode")
CONTROL = "control"


def _finding(name: str) -> dict[str, Any]:
    found: dict[str, Any] = results(f"findings/thinking/thinking-{name}")
    return found


def thinking_verdict(name: str) -> str:
    """The verdict on a claim: recency, stability, attention or residency."""
    return str(_finding(name)["verdict"])


def thinking_note(name: str, begin: str) -> str:
    """The note of a finding that begins so."""
    (found,) = (str(note) for note in _finding(name)["notes"] if note.startswith(begin))
    return found


def thinking_p(name: str) -> str:
    """One-sided p-value: of a claim of two parts, the larger one."""
    return f"{_finding(name)['p_value']:.4f}"


def _rules(page: int, scope: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (row["rule"], row["kind"]): row
        for row in _finding("recency")["rows"]
        if (row["page"], row["scope"], row["phase"], row["kept"]) == (page, scope, "all", KEPT)
    }


def thinking_recall_table(scope: str, page: int = 16) -> str:
    """Of what tokens want, the share that each rule kept, where a fifth is kept."""
    rows = _rules(page, scope)
    return table(
        [
            "rule",
            "thought, 5 steps on",
            "10 steps on",
            "attention, 5 steps on",
            "false evictions",
            "normal decode, 5 steps on",
        ],
        [
            [
                rule,
                "{:.2f} ({:.2f} to {:.2f})".format(*(row[name] for name in ("recall at 5", "low", "high"))),
                f"{row['recall at 10']:.2f}",
                f"{row['mass at 5']:.2f}",
                f"{row['false evictions']:.2f}",
                "{:.2f} ({:.2f} to {:.2f})".format(
                    *(rows[rule, "decode"][name] for name in ("recall at 5", "low", "high"))
                ),
            ]
            for (rule, kind), row in rows.items()
            if kind == "thought"
        ],
    )


def thinking_moves_table(by_phase: bool = False) -> str:
    """How wanted pages move from step to step; by phase of the thought, with pages of 16."""
    columns = {
        "adjacent Jaccard": "Jaccard of neighbouring steps",
        "consistency": "consistency (RCO)",
        "of unstable heads": "of unstable heads",
        "promoted": "promoted per ranking",
        "wrong, unstable": "wrong evictions, unstable heads",
        "wrong, stable": "stable heads",
        "wrong, random control": "random, prompt kept",
        "wanted within 1": "wanted the step before",
        "wanted within 16": "within 16",
        "wanted within 256": "within 256",
        "recurrence": "recurrence",
    }
    return table(
        ["phase" if by_phase else "", "pages of", "answers", *columns.values()],
        [
            [
                row["phase"] if by_phase else row["kind"],
                str(row["page"]),
                str(row["requests"]),
                *(f"{row[name]:.2f}" for name in columns),
            ]
            for row in _finding("stability")["rows"]
            if row["kind"] in (*KINDS, CONTROL)
            and (row["phase"] != "all" and row["page"] == 16 if by_phase else row["phase"] == "all")
        ],
    )


def thinking_milestone_table(by_phase: bool = False) -> str:
    """How often old pages of a thought are wanted, with a milestone and without; by its phase in small pages,
    since all of 16 tokens have one."""
    rows = [
        row
        for row in _finding("attention")["rows"]
        if row["kind"] == "thought"
        and (row["phase"] != "all" and row["page"] < 16 if by_phase else row["phase"] == "all")
    ]
    return table(
        [
            *(["phase"] if by_phase else []),
            *("pages of", "with a milestone", "without", "kept by the random control", "times as often"),
        ],
        [
            [
                *([row["phase"]] if by_phase else []),
                str(row["page"]),
                f"{row['late wants, milestones']:.3f}",
                "all have one" if row["late wants, others"] is None else f"{row['late wants, others']:.3f}",
                f"{row['late wants, random control']:.3f}",
                row["times"] or "",
            ]
            for row in rows
        ],
    )


def thinking_loads_table(page: int = 16, scope: str = "context") -> str:
    """Pages loaded of those wanted, by rule and room."""
    rows = [row for row in _finding("residency")["rows"] if (row["page"], row["scope"]) == (page, scope)]
    shares = sorted({row["kept"] for row in rows})
    found = {(row["rule"], row["kept"]): row for row in rows}
    return table(
        [
            "rule",
            *(f"room for {share:.0%}" for share in shares),
            f"fewer than the best at {KEPT:.0%}",
            *(f"us a token, HBM {share:.0%}" for share in shares[:2]),
        ],
        [
            [
                rule,
                *(f"{found[rule, share]['loaded']:.3f}" for share in shares),
                "{:.2f} ({:.2f} to {:.2f})".format(
                    *(found[rule, KEPT][name] for name in ("fewer than best", "low", "high"))
                ),
                *(f"{found[rule, share]['us per token']:.0f}" for share in shares[:2]),
            ]
            for rule in dict.fromkeys(row["rule"] for row in rows)
        ],
    )


def fewer_loads_than(rule: str, kept: float = KEPT, page: int = 16) -> float:
    """Percent of a rule's loads that the exponential average saves, with room for a share of the context."""
    loaded = {
        row["rule"]: row["loaded"]
        for row in _finding("residency")["rows"]
        if (row["page"], row["scope"], row["kept"]) == (page, "context", kept)
    }
    return 100 * float(1 - loaded["EMA"] / loaded[rule])


def num_page_features() -> int:
    """Facts of a page that the learned rule knows."""
    return len(PAGE_FEATURES)


def served_thoughts_table() -> str:
    """Thoughts that need four times the device's memory, by server; ratios are within a round."""
    rows = results("pages_thoughts")["rows"]
    found = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        ratios = sorted(row["of stock"] for row in own)
        thoughts = sum(row["thoughts"] for row in own)
        found.append(
            [
                arm,
                f"{sum(row['right'] for row in own)} of {thoughts}",
                f"{sum(row['tokens'] for row in own) / thoughts:.0f}",
                f"{median(row['seconds'] for row in own):.0f}",
                f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            ]
        )
    head = ["server", "right", "tokens of a thought", "seconds of eight", "throughput, of HiCache"]
    return table(head, found)


def served_thoughts(name: str) -> str:
    """Device tokens, tokens needed, or rounds of the thoughts that were served."""
    rows = results("pages_thoughts")["rows"]
    if name == "rounds":
        return str(len({row["round"] for row in rows}))
    return f"{rows[0][name]:,}"
