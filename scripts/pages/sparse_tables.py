"""Tables of what steps that read chosen pages cost, save and miss, made of ``benchmark/results``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmark.serving.measured import table
from scripts.pages.figures import results
from sgl_importance.pages.device_plan import TILE_TOKENS, DevicePlan, KvShape


def exact_match_table(task: str) -> str:
    """Share of right answers by selector and length, the exact server's where it is below 1."""
    rows = [row for row in results("pages_exact_match")["rows"] if row["task"] == task]
    lengths = sorted({row["length"] for row in rows})
    found = {(row["selector"], row["length"]): row for row in rows}

    def cell(row: Mapping[str, Any] | None) -> str:
        if row is None:
            return ""
        dense = "" if row["dense"] == 1 else f", exact {row['dense']:.2f}"
        return f"{row['sparse']:.3f} of {row['n']}{dense}"

    return table(
        ["selector", *(f"{length:,} tokens" for length in lengths)],
        [
            [f"`{selector}`", *(cell(found.get((selector, length))) for length in lengths)]
            for selector in dict.fromkeys(row["selector"] for row in rows)
        ],
    )


def layer_table() -> str:
    """One layer's decode step, in milliseconds and as ratios."""
    return table(
        [
            "context",
            "sglang's torch-native",
            "dense, no copy",
            "scan",
            "sparse",
            "times torch-native",
            "times dense",
        ],
        [
            [
                f"{row['context']:,}",
                *(f"{row[f'{arm}_ms']:.1f}" for arm in ("upstream", "dense", "scan", "sparse")),
                f"{row['times_upstream']:.1f}",
                f"{row['times_dense']:.1f}",
            ]
            for row in results("pages_layer")["rows"]
        ],
    )


def served_pages_table() -> str:
    """Requests to real servers, in milliseconds, and how many times as fast as stock in the same round."""
    return table(
        ["context", "what", "server", "ms", "times as fast as stock (worst to best round)"],
        [
            [
                f"{row['context']:,}",
                {"decode": "a further token", "question": "a question about a cached document"}[row["what"]],
                row["arm"],
                f"{row['ms']:.0f}",
                f"{row['times_stock']:.2f} ({row['worst_round']:.2f} to {row['best_round']:.2f})",
            ]
            for row in results("pages_served")["rows"]
        ],
    )


def metadata_gigabytes(purpose: str) -> float:
    """What 32 requests of 128k tokens of a 70B model take on the device, by purpose; ``kv``: in the pool."""
    shape = KvShape(layers=80, kv_heads=8, key_dim=128, value_dim=128, item_bytes=2)
    tokens, page_size = 32 * 131_072, 16
    plan = DevicePlan(
        shape,
        page_size=page_size,
        num_pages=tokens // page_size + 1,
        num_slots=tokens // page_size // 10,
        num_frames=32,
        staging_pages=TILE_TOKENS // page_size,
        budget_bytes=0,
        vectors_per_page=4,
    )
    sizes = {**plan.bytes_by_purpose, "kv": tokens * shape.token_bytes}
    return sizes[purpose] / 1e9


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


def _range(cells: Mapping[Any, Mapping[str, Any]], policy: str, bias: float) -> tuple[float, float]:
    masses = [cell["mass"] for (name, x, _), cell in cells.items() if (name, x) == (policy, bias)]
    return min(masses), max(masses)


def h3_verdict() -> str:
    """The verdict as the study words it."""
    return str(results("findings/h3/h3")["verdict"])


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


def adversarial_table() -> str:
    """Right answers by selector and case, how sure the model was, what audits found, saved and cost."""
    rows = {(row["selector"], row["mode"], row["case"]): row for row in results("pages_adversarial")["rows"]}

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    return table(
        [
            "selector",
            "case",
            "right",
            "confidence when right, wrong",
            "mean missed when right, wrong",
            "largest missed page when right, wrong",
            "right with audits",
            "read with audits",
        ],
        [
            [
                f"`{selector}`",
                case,
                f"{row['right']:.2f} of {row['n']}",
                *(
                    f"{number(row[f'{name}_right'])}, {number(row[f'{name}_wrong'])}"
                    for name in ("confidence", "missed_mass", "missed_page")
                ),
                f"{audited['right']:.2f}",
                f"{audited['read']:.2f}",
            ]
            for (selector, mode, case), row in rows.items()
            if mode == "none" and (audited := rows.get((selector, "audit", case)))
        ],
    )


def least_bound() -> float:
    """Smallest bound on the missed share that bounding boxes gave in any layer, of all questions."""
    return min(row["least_bound"] for row in results("pages_bounds")["rows"])
