"""Tables of which pages are on the device when a step reads them, made of ``benchmark/results``."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmark.serving.measured import table
from scripts.rendering.figures import results

QUANTILES = ("p50", "p95", "p99")


def budgets_table() -> str:
    """Share of the pages read that was loaded, by how slots are divided; in brackets, of shared slots'."""
    rows = results("pages_budgets")["rows"]
    cells = {(row["way"], row["slots"]): row for row in rows}
    shares = list(dict.fromkeys(row["slots"] for row in rows))
    return table(
        ["slots", *(f"room for {share:.0%}" for share in shares)],
        [
            [
                way,
                *(
                    f"{cell['loaded']:.3f} ({cell['of shared']:.2f}, {cell['low']:.2f} to {cell['high']:.2f})"
                    for cell in (cells[way, share] for share in shares)
                ),
            ]
            for way in dict.fromkeys(row["way"] for row in rows)
        ],
    )


def h3_table() -> str:
    """H3: share of the pages read that was loaded, in brackets of LRU's, and attention on what was read."""
    # The server's own first request is a workload of one.
    rows = [row for row in results("findings/h3/h3")["rows"] if row["requests"] > 1]
    columns = list(dict.fromkeys((row["context"], row["workload"]) for row in rows))
    cells = {(row["policy"], row["bias"], row["workload"]): row for row in rows}
    return table(
        [
            "policy",
            "bias",
            *(f"{workload.partition(': ')[2]}, {context:,}" for context, workload in columns),
            "attention read",
        ],
        [
            [
                f"`{policy}`",
                f"{bias:g}",
                *(
                    f"{cell['loaded']:.3f} ({cell['of lru']:.2f})"
                    for cell in (cells[policy, bias, workload] for _, workload in columns)
                ),
                " to ".join(f"{end:.3f}" for end in _range(cells, policy, bias)),
            ]
            for policy, bias in dict.fromkeys((row["policy"], row["bias"]) for row in rows)
        ],
    )


def h3_waits_table() -> str:
    """Pages that a token waits for, P50 / P95 / P99, of the best independent choice and of joint ones."""
    # The server's own first request is a workload of one.
    rows = [row for row in results("findings/h3-16k/h3")["rows"] if row["requests"] > 1]
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        of_it = [row for row in rows if row["workload"] == workload]
        served = [row for row in of_it if row["policy"] not in ("random", "belady")]
        best = min((row for row in served if not row["bias"]), key=lambda row: row["loaded"])
        for row in (best, *(row for row in served if row["policy"] == "ema" and row["bias"])):
            ratios = " / ".join(f"{row[name] / best[name]:.2f}" for name in ("p50", "p95", "p99"))
            lines.append(
                [
                    f"{workload.partition(': ')[2]}, {row['context']:,}",
                    f"`{row['policy']}`, bias {row['bias']:g}" if row["bias"] else f"`{row['policy']}`",
                    " / ".join(f"{row[name]:.0f}" for name in ("p50", "p95", "p99")),
                    ratios,
                    f"{row['mass'] / best['mass']:.3f}",
                ]
            )
    return table(
        [
            "what",
            "slots",
            "pages waited for, P50 / P95 / P99",
            "of the best independent",
            "attention, of its",
        ],
        lines,
    )


def _range(cells: Mapping[Any, Mapping[str, Any]], policy: str, bias: float) -> tuple[float, float]:
    masses = [cell["mass"] for (name, x, _), cell in cells.items() if (name, x) == (policy, bias)]
    return min(masses), max(masses)


def h3_verdict(recordings: str = "h3") -> str:
    """The verdict as the study words it; ``h3-16k``: of longer recordings."""
    return str(results(f"findings/{recordings}/h3")["verdict"])


def residency_table() -> str:
    """Share of the chosen pages that had to be loaded, by policy and bias; in brackets, of LRU's."""
    rows = results("pages_residency")["rows"]
    cells = {(row["policy"], row["bias"], row["context"], row["what"]): row for row in rows}
    columns = list(dict.fromkeys((row["context"], row["what"]) for row in rows))

    def cell(row: Mapping[str, Any]) -> str:
        right = "" if row["exact_match"] is None else f", {row['exact_match']:.2f} right"
        return f"{row['loaded_share']:.3f} ({row['of_lru']:.2f}{right})"

    return table(
        ["policy", "bias", *(f"{what}, {context:,}" for context, what in columns)],
        [
            [f"`{policy}`", f"{bias:g}", *(cell(cells[policy, bias, *column]) for column in columns)]
            for policy, bias in dict.fromkeys((row["policy"], row["bias"]) for row in rows)
        ],
    )


def _replayed(**setting: Any) -> list[Mapping[str, Any]]:
    """Rows of the replay of pages brought at admission in a setting; the rest as the server has it."""
    wanted = {
        "part": "replay",
        "questions": "fresh",
        "policy": "ema",
        "slots": 0.2,
        "prior": False,
        **setting,
    }
    return [row for row in results("pages_prefetch")["rows"] if wanted.items() <= row.items()]


def _interval(found: tuple[float, float, float]) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*found)


def prefetch_table() -> str:
    """Pages of all layers that are loaded for a question, before its first step, by it and by later ones."""
    rows = _replayed(prompt_selects=True)
    usual = [row for row in rows if row["budget"] in (0.0, 0.1)]
    return table(
        ["context", "brought", "at admission", "first step", "later steps", "named of the first's", "copies"],
        [
            [
                f"{row['context']:,}",
                row["ranking"],
                *(f"{row[name]:.0f}" for name in ("brought", "first", "later")),
                _interval(row["named"]),
                _interval(row["copies"]),
            ]
            for row in usual
        ],
    )


def prefetch_saves(name: str, ranking: str, **setting: Any) -> str:
    """The range over lengths and kinds of question of what a ranking saves, at a token's budget.

    Args:
        name: of a column with an interval.
        ranking: what is brought.
        setting: as of ``_replayed``.
    """
    found = [
        row[name][0]
        for kind in ("fresh", "popular")
        for row in _replayed(ranking=ranking, questions=kind, **setting)
        if row["budget"] in (0.0, 0.1)
    ]
    low, high = f"{min(found):.2f}", f"{max(found):.2f}"
    return low if low == high else f"{low} to {high}"


def prior_saves() -> str:
    """Loads that steps wait for with the tree's importance as a prior, as parts of those without; a range."""
    found = [
        row["steps"][0]
        for kind in ("fresh", "popular")
        for row in _replayed(policy="importance", prior=True, questions=kind)
    ]
    return f"{min(found):.2f} to {max(found):.2f}"


def served_warm(name: str, *, throttled: bool) -> str:
    """Questions whose pages were on the device, beside those whose pages were not: percent, with interval.

    Args:
        name: ``second_token`` or ``loads``; or, of the time to the second token where the pages were not
            there, ``waiting``: share that was spent on loads, and ``saved``: on more of them.
        throttled: whether copies were slowed down.
    """
    (row,) = (
        row
        for row in results("pages_prefetch")["rows"]
        if row["part"] == "served" and row["throttled"] == throttled
    )
    return "{:.1f} % ({:.1f} to {:.1f})".format(*(100 * value for value in row[name]))


def latency_table() -> str:
    """Milliseconds a token with a preference, beside the best independent choice in the same round."""
    rows = results("pages_latency")["rows"]
    lines = []
    for key in dict.fromkeys((row["context"], row["throttled"], row["what"], row["arm"]) for row in rows):
        context, throttled, what, arm = key
        own = [row for row in rows if (row["context"], row["throttled"], row["what"], row["arm"]) == key]
        if "bias" not in arm and arm != own[0]["best"]:
            continue

        def of_best(name: str, own: list[Mapping[str, Any]] = own) -> str:
            ratios = sorted(row[f"{name}_ratio"] for row in own)
            return f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"

        lines.append(
            [
                f"{what}, {context:,}",
                "throttled" if throttled else "as it is",
                f"{arm} (best)" if arm == own[0]["best"] else arm,
                " / ".join(f"{median(row[f'{name}_ms'] for row in own):.1f}" for name in QUANTILES),
                *(of_best(name) for name in QUANTILES),
                f"{median(row['load_ms'] for row in own):.1f}",
                f"{min(row['right'] for row in own):.2f}" if what == "questions" else "",
            ]
        )
    return table(
        [
            "what",
            "link",
            "slots",
            "ms a token, P50 / P95 / P99",
            "P50, of the best independent",
            "P95",
            "P99",
            "of these for loads, mean",
            "right",
        ],
        lines,
    )
