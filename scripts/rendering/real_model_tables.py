"""What a trained model takes on a CPU, made of ``benchmark/results``."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmark.serving.measured import table as _table
from scripts.rendering.cells import interval as _interval
from scripts.rendering.figures import results


def _median(what: str, number: str, tokens: int | None = None) -> float:
    rows = [row for row in results("real_model_times")["rows"] if row["what"] == what]
    return median(row[number] for row in rows if tokens in (None, row["tokens"]))


def second_turn() -> str:
    """Seconds to the first token of a conversation's second turn: from the cache, and without one."""
    cached, cold = (_median("second turn", number) for number in ("cached_s", "cold_s"))
    return f"{cached:.1f} s instead of {cold:.1f}"


def second_turn_cached() -> str:
    """How much of that turn's prompt came from the cache."""
    cached, tokens = (_median("second turn", number) for number in ("cached_tokens", "tokens"))
    return f"{cached:,.0f} of {tokens:,.0f} tokens"


_PAGES = {
    "smollm2": ("pages_real_model", "pages_real_model_4096", "pages_real_model_8000"),
    "gemma3-270m": ("pages_real_model_gemma3", "pages_real_model_gemma3_8000"),
}
_TEXTS = {"quoted": "quoted passages", "plain": "ordinary text", "record": "records planted in text"}


def real_pages_table(model: str = "smollm2") -> str:
    """Divergence from exact attention where every layer reads a share of the pages, choice by layer."""
    lines = []
    for row in (row for file in _PAGES[model] for row in results(file)["rows"] if row["grain"] == "layer"):
        divergences = [_interval(row[kind], "value", form=".3f") for kind in _TEXTS]
        over = [_interval(row[f"{kind}_of_oracle"], "value") for kind in ("quoted", "plain")]
        kept = f"{row['records_kept']} of {row['records']}"
        lines.append(
            [
                f"{row['tokens']:,}",
                str(row["windows"]),
                f"{row['share']:.0%}",
                f"`{row['selector']}`",
                f"{row['of_kv']:.1%}",
                *divergences,
                *over,
                kept,
            ]
        )
    titles = [
        "tokens",
        "stretches",
        "read",
        "selector",
        "of the KV's bytes",
        *_TEXTS.values(),
        "quoted / `oracle`",
        "ordinary / `oracle`",
    ]
    return _table([*titles, "records kept"], lines)


def hard_records_table() -> str:
    """Records of SmolLM2's that are hard to find, with a tenth of the pages read."""
    rows = results("pages_real_model_hard")["rows"]
    lines = [
        [
            row["layout"],
            str(row["windows"]),
            f"`{row['selector']}`",
            _interval(row["record"], "value", form=".3f"),
            f"{row['records_kept']} of {row['records']}",
        ]
        for row in rows
    ]
    return _table(["records", "stretches", "selector", "divergence there", "kept"], lines)


def hard_records_kept(selector: str) -> str:
    """Of all of them."""
    rows = [row for row in results("pages_real_model_hard")["rows"] if row["selector"] == selector]
    return f"{sum(row['records_kept'] for row in rows)} of {sum(row['records'] for row in rows)}"


def records_kept(share: float, tokens: int = 2048, *, model: str = "smollm2", selector: str = "bits") -> str:
    """Of the planted records that exact attention finds, those that a selector finds in such a share."""
    row = _chosen(share, tokens, model, selector)
    return f"{row['records_kept']} of {row['records']}"


def diverges_by(share: float, kind: str, *, model: str, selector: str = "bits", tokens: int = 2048) -> str:
    """Divergence on a kind of text (``quoted``, ``plain``) in those of the choice by every exact key."""
    return _interval(_chosen(share, tokens, model, selector)[f"{kind}_of_oracle"], "value")


def _chosen(share: float, tokens: int, model: str, selector: str) -> dict[str, Any]:
    wanted = {"selector": selector, "share": share, "grain": "layer", "tokens": tokens}
    (row,) = (row for file in _PAGES[model] for row in results(file)["rows"] if wanted.items() <= row.items())
    found: dict[str, Any] = row
    return found


_ORDERS = {
    "exact": "what it chose; copies are waited for",
    "last step": "what the step before chose",
    "last layer": "what the layer before chose",
    "resident": "of its choice what is there",
}


def copies_ahead_table() -> str:
    """Attention and next tokens where pages are copied behind other work."""
    lines = [
        [
            f"{row['tokens']:,}",
            f"{row['share']:.0%}",
            _ORDERS[row["order"]],
            _interval(row["of_exact"], "value", form=".3f"),
            *(_interval(row[kind], "value") for kind in ("plain", "quoted")),
        ]
        for row in results("copies_ahead")["rows"]
    ]
    titles = ["context", "chosen", "read", "attention, of the chosen pages'", "text goes on, nats"]
    return _table([*titles, "a passage again, nats"], lines)


def copies_ahead(number: str, tokens: int, share: float = 0.1, order: str = "exact") -> str:
    """A number of that measurement, with its interval."""
    (row,) = (
        row
        for row in results("copies_ahead")["rows"]
        if (row["tokens"], row["share"], row["order"]) == (tokens, share, order)
    )
    return _interval(row[number], "value")


def copies_ahead_served_table() -> str:
    """What a served model reads and answers that chooses by the last step's query."""
    lines = [
        [
            f"{row['tokens']:,}",
            str(row["windows"]),
            {"exact": "its own query", "last step": "the query of the step before"}[row["order"]],
            *(
                _interval(row[name], "value", form=".3f") if name in row else ""  # audits found it: they went
                for name in ("covered", "of_exact")
            ),
            *(_interval(row[kind], "value") for kind in ("equal", "plain", "quoted")),
        ]
        for row in results("copies_ahead_served")["rows"]
    ]
    titles = ["context", "windows", "chosen by", "attention on what is read", "of the exact order's"]
    return _table([*titles, "equal tokens", "text goes on, nats", "a passage again, nats"], lines)


def copies_ahead_windows() -> str:
    """How many windows of each length it rests on."""
    return str(min(row["windows"] for row in results("copies_ahead")["rows"]))


_READS = {
    "dense": "all of it, nothing copied",
    "upstream": "all of it, sglang's own CPU attention",
    "tiered all": "all of it, tiered",
    "token": "a tenth, by `token`",
    "bits": "a tenth, by `bits`",
}


def real_decode_table() -> str:
    """Milliseconds of a further token, and medians and ranges of ratios within a round."""
    lines = []
    for tokens, arm in dict.fromkeys((row["tokens"], row["arm"]) for row in _decode_rows()):
        own, dense, tiered = (_decode(tokens, each) for each in (arm, "dense", "tiered all"))
        cells = [_ratios(own, base) for base in (dense, tiered)]
        lines.append([f"{tokens:,}", _READS[arm], f"{median(own.values()):.0f}", *cells])
    return _table(["context", "reads", "ms a token", "over dense", "over tiered, all"], lines)


def decode_over(arm: str, base: str, tokens: int) -> str:
    """Ratio of two arms' milliseconds a token, median over rounds."""
    own, other = _decode(tokens, arm), _decode(tokens, base)
    return f"{median(own[number] / other[number] for number in own):.2f}"


def _decode_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = results("real_model_decode")["rows"]
    return rows


def _decode(tokens: int, arm: str) -> dict[int, float]:
    """Milliseconds by round."""
    return {
        row["round"]: row["decode_ms"]
        for row in _decode_rows()
        if (row["tokens"], row["arm"]) == (tokens, arm)
    }


def _ratios(own: dict[int, float], base: dict[int, float]) -> str:
    ratios = sorted(own[number] / base[number] for number in own.keys() & base.keys())
    return f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
