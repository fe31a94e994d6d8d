"""Why recorded agents' prompts were computed (benchmark/miss_reasons.py)."""

from __future__ import annotations

from math import exp, log

from benchmark.intervals import interval
from benchmark.serving.measured import table
from scripts.rendering.figures import Row, results, row

_NAMES = {"observe": "LRU", "importance": "ours"}


def misses_by_reason() -> str:
    """Shares of the prompts' tokens, a line for each row of the file."""
    rows: list[Row] = results("miss_reasons")["rows"]
    reasons = list(dict.fromkeys(reason for each in rows for reason in each["missed"]))
    lines = []
    for each in rows:
        tokens = [each["found_tokens"], *(each["missed"].get(reason, 0) for reason in reasons)]
        shares = [f"{count / each['prompt_tokens']:.1%}" for count in tokens]
        lines.append(
            [each["beginning"], f"1/{each['part']}", _NAMES[each["policy"]], str(each["refused"]), *shares]
        )
    titles = ["prompts", "pool, of the unique tokens", "evicts by", "refused", "found"]
    return table([*titles, *(f"`{reason}`" for reason in reasons)], lines)


def found_of(beginning: str, part: int, policy: str) -> str:
    """Share of the prompts' tokens that was found."""
    found = row("miss_reasons", beginning=beginning, part=part, policy=policy)
    return f"{found['found_tokens'] / found['prompt_tokens']:.1%}"


def computed_over_lru(part: int) -> str:
    """Tokens that ours computes over those of LRU, mean over orders of turns with a 95 % interval."""
    lru, ours = (
        row("miss_reasons", beginning="as recorded", part=part, policy=policy)["computed_by_order"]
        for policy in _NAMES
    )
    mean, low, high = map(exp, interval([log(own / its) for own, its in zip(ours, lru, strict=True)]))
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"


def missed_of(beginning: str, part: int, policy: str, reason: str) -> str:
    """Share of the prompts' tokens that was computed for one reason."""
    found = row("miss_reasons", beginning=beginning, part=part, policy=policy)
    return f"{found['missed'].get(reason, 0) / found['prompt_tokens']:.1%}"


def misses_requests() -> int:
    """Prompts that are recorded."""
    first = results("miss_reasons")["rows"][0]
    count: int = first["requests"] + first["refused"]
    return count
