"""Tables of what steps that read chosen pages cost and answer, made of ``benchmark/results``."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmark.serving.measured import table
from scripts.rendering.figures import results


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
        [
            *("selector", "context", "divergence, nats a byte", "same likeliest byte", "loss beside exact"),
            f"less than exact behind {rows[0]['context']:,} bytes",
        ],
        [
            [
                f"`{row['selector']}`",
                f"{row['context']:,}",
                _with_interval(row["divergence"]),
                _with_interval(row["agreement"]),
                f"{row['gain']['value'] - row['gain_chosen']['value']:+.3f}",
                _with_interval(row["gain_chosen"]),
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
            "scan / `rep`'s",
            "scan / `token`'s",
        ],
        [
            [
                f"{row['context']:,}",
                *(f"{row[f'{arm}_ms']:.1f}" for arm in ("upstream", "dense", "scan", "sparse")),
                f"{row['times_upstream']:.1f}",
                f"{row['times_dense']:.1f}",
                *(f"{row['scan_of'][name]:.2f}" for name in ("rep", "token")),
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


def served_pages_over(arm: str, context: int) -> float:
    """How many times as fast as stock's a further token is, median over rounds."""
    rows = results("pages_served")["rows"]
    (ratio,) = (
        float(row["times_stock"])
        for row in rows
        if (row["arm"], row["context"], row["what"]) == (arm, context, "decode")
    )
    return ratio


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


def load_over(arm: str, context: int, *, throttled: bool, name: str = "tokens_per_second") -> str:
    """A server under load, over stock with HiCache: median and range of ratios within a round."""
    wanted = context, throttled, arm
    ratios = sorted(
        row[f"{name}_ratio"]
        for row in results("pages_load")["rows"]
        if (row["context"], row["throttled"], row["arm"]) == wanted
    )
    return f"{median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})"


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


def history_table() -> str:
    """What it takes that answers from chosen pages are computed again as history."""
    return table(
        [
            "document",
            "answer, tokens",
            "computed again, tokens",
            "first token, ms",
            "with that history cached, ms",
            "turn, ms",
            "of the turn",
        ],
        [
            [
                f"{row['context']:,}",
                f"{row['answer']}",
                f"{row['again']:.0f}",
                f"{row['first_ms']:,.0f}",
                f"{row['first_cached_ms']:,.0f}",
                f"{row['turn_ms']:,.0f}",
                "{value:.1%} ({low:.1%} to {high:.1%})".format(**row["share"]),
            ]
            for row in results("pages_history")["rows"]
        ],
    )
