"""Tables of what steps that read chosen pages cost, save and miss, made of ``benchmark/results``."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
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
        dense = "" if row["dense"] == 1 else f", exact {row['dense']:.3f}"
        return f"{row['sparse']:.3f} of {row['n']}{dense}"

    return table(
        ["selector", *(f"{length:,} tokens" for length in lengths)],
        [
            [f"`{selector}`", *(cell(found.get((selector, length))) for length in lengths)]
            for selector in dict.fromkeys(row["selector"] for row in rows)
        ],
    )


def text_model_steps() -> str:
    """How long the text model was trained."""
    (steps, size) = {(row["steps"], row["bytes_of_a_step"]) for row in results("pages_text")["rows"]}.pop()
    return f"{steps:,} steps of {size:,} bytes"


def text_gain_table() -> str:
    """What longer contexts are worth to exact attention on text; intervals over files."""
    rows = results("pages_text")["rows"]
    rows = [row for row in rows if row["selector"] == rows[0]["selector"]]
    return table(
        ["context", "loss, nats a byte", f"less than behind {rows[0]['context']:,} bytes"],
        [
            [
                f"{row['context']:,}",
                _with_interval(row["loss"]),
                "" if row is rows[0] else _with_interval(row["gain"]),
            ]
            for row in rows
        ],
    )


def text_table() -> str:
    """The next byte's distribution from chosen pages beside exact attention, by selector and context."""
    rows = results("pages_text")["rows"]
    return table(
        ["selector", "context", "divergence, nats a byte", "same likeliest byte", "loss beside exact"],
        [
            [
                f"`{row['selector']}`",
                f"{row['context']:,}",
                _with_interval(row["divergence"]),
                _with_interval(row["agreement"]),
                f"{row['gain']['value'] - row['gain_chosen']['value']:+.3f}",
            ]
            for row in rows
            if row["context"] in (2048, 8192)
        ],
    )


def _with_interval(estimate: Mapping[str, float]) -> str:
    return f"{estimate['value']:.3f} ({estimate['low']:.3f} to {estimate['high']:.3f})"


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


def page_scores_table() -> str:
    """Host time on page scores beside a selector, and of requests, in milliseconds."""
    return table(
        ["what", "context", "answer, tokens", "observed passes", "request, ms", "page scores, ms", "share"],
        [
            [
                row["what"],
                f"{row['context']:,}",
                f"{row['answer_tokens']}",
                f"{row['observed_passes']:.2g}",
                f"{row['request_ms']:,.0f}",
                f"{row['scores_ms']:.0f}",
                f"{100 * row['share']:.1f} %",
            ]
            for row in results("pages_scores")["rows"]
        ],
    )


def most_of_page_scores() -> float:
    """The largest share of a request's time that its page scores took."""
    return max(float(row["share"]) for row in results("pages_scores")["rows"])


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


def rebuilding_table() -> str:
    """What it takes to build again what is kept of the pages of a context, in one layer."""
    return table(
        ["selector", "tokens", "built in, ms", "of one token's attention to them", "bytes, of bf16 KV"],
        [
            [
                f"`{row['selector']}`",
                f"{row['context']:,}",
                f"{row['build_ms']:.0f}",
                f"{row['of_attention']:.1f}",
                f"{100 * row['bytes_of_bf16_kv']:.1f} %",
            ]
            for row in results("pages_rebuilding")["rows"]
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


def h3_verdict_at_16k() -> str:
    """The verdict of the longer recordings as the study words it."""
    return str(results("findings/h3-16k/h3")["verdict"])


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


def _replayed(**setting: Any) -> list[Mapping[str, Any]]:
    """Rows of ``benchmark/pages/prefetch.py`` in a setting; what is not named is as the server has it."""
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


def load_table() -> str:
    """Throughput and TTFT under load, and as a part of stock's with HiCache in the same round."""
    rows = results("pages_load")["rows"]

    def cells(own: list[Mapping[str, Any]], name: str, digits: int) -> list[str]:
        ratios = sorted(row[f"{name}_ratio"] for row in own)
        middle = f"{median(row[name] for row in own):.{digits}f}"
        return [middle, f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"]

    found = []
    for key in dict.fromkeys((row["context"], row["throttled"], row["arm"]) for row in rows):
        context, throttled, arm = key
        own = [row for row in rows if (row["context"], row["throttled"], row["arm"]) == key]
        link = "throttled" if throttled else "as it is"
        parts = [*cells(own, "tokens_per_second", 0), *cells(own, "ttft_p95", 1), f"{len(own)}"]
        found.append([f"{context:,}", link, arm, *parts])
    return table(
        ["context", "link", "server", "tokens / s", "of HiCache", "p95 TTFT, s", "of HiCache", "rounds"],
        found,
    )


BLIND_SPOTS = {
    "rep": "keys of a page that has more outlying ones than vectors are kept",
    "quest": "which page of many whose keys differ much: their boxes all promise much",
    "mean": "one key among the others of its page",
    "infllm": "one key among the others of its page, which has one vector: a block is read for it",
    "window": "all that is neither first nor last",
    "token": "what rounding to int8 hides",
    "oracle": "that a layer needs more pages than the budget: it knows their true attention",
}
"""What each selector cannot see."""


def _adversarial() -> dict[tuple[str, str, str], Mapping[str, Any]]:
    return {(row["selector"], row["mode"], row["case"]): row for row in results("pages_adversarial")["rows"]}


def _wrong(row: Mapping[str, Any]) -> int:
    return round((1 - row["right"]) * row["n"])


def overlooked(selector: str) -> str:
    """Wrong answers of all, without audits, over the cases that exact attention has right."""
    rows = [
        row
        for (name, mode, case), row in _adversarial().items()
        if (name, mode) == (selector, "none") and case != "decoys"
    ]
    return f"{sum(map(_wrong, rows))} of {sum(row['n'] for row in rows)}"


def exact_confidence() -> str:
    """Mean probability of right answers from exact attention, over the cases that it has right."""
    sure = [
        row["confidence_right"]
        for (name, _, case), row in _adversarial().items()
        if name == "all" and case != "decoys"
    ]
    return f"{min(sure):.3f} or more"


def blind_spots_table() -> str:
    """What each selector overlooks, how often it did where exact attention was right, and how surely."""
    rows = _adversarial()
    cases = [case for (selector, _, case) in rows if selector == "all" and case != "decoys"]

    def line(selector: str) -> list[str]:
        own = [rows[selector, "none", case] for case in cases if (selector, "none", case) in rows]
        count, asked = sum(map(_wrong, own)), sum(row["n"] for row in own)
        sure = sum(_wrong(row) * (row["confidence_wrong"] or 0.0) for row in own)
        pairs = [
            (row, rows[selector, "audit", row["case"]])
            for row in own
            if (selector, "audit", row["case"]) in rows
        ]
        saved = sum(_wrong(row) - _wrong(audited) for row, audited in pairs)
        return [
            f"`{selector}`",
            BLIND_SPOTS[selector],
            f"{count} of {asked}",
            f"{sure / count:.2f}" if count else "",
            f"{saved} of {sum(_wrong(row) for row, _ in pairs)}" if pairs else "",
        ]

    return table(
        ["selector", "cannot see", "wrong answers", "how sure of them", "of these, saved by audits"],
        [line(selector) for selector in BLIND_SPOTS if (selector, "none", "plain") in rows],
    )


def adversarial_table() -> str:
    """Right answers by selector and case, how sure the model was, what audits found and triggers saved."""
    rows = _adversarial()

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    def saved(selector: str, case: str, mode: str) -> str:
        row = rows.get((selector, mode, case))
        return "" if row is None else f"{row['right']:.2f} ({row['read']:.2f})"

    return table(
        [
            "selector",
            "case",
            "right, of",
            "exactly",
            "confidence when right, wrong",
            "mean missed when right, wrong",
            "largest missed page when right, wrong",
            "with audits (read)",
            "with confidence (read)",
        ],
        [
            [
                f"`{selector}`",
                case,
                f"{row['right']:.2f} of {row['n']}",
                f"{rows['all', 'none', case]['right']:.2f}",
                *(
                    f"{number(row[f'{name}_right'])}, {number(row[f'{name}_wrong'])}"
                    for name in ("confidence", "missed_mass", "missed_page")
                ),
                saved(selector, case, "audit"),
                saved(selector, case, "confidence"),
            ]
            for (selector, mode, case), row in sorted(rows.items())
            if mode == "none" and selector != "all"
        ],
    )


def least_bound() -> float:
    """Smallest bound on the missed share that bounding boxes gave in any layer, of all questions."""
    return min(row["least_bound"] for row in results("pages_bounds")["rows"])
