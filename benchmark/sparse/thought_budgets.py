"""How much of its context must a thought read to stay right, by selector?

    python benchmark/sparse/thought_budgets.py

The embedded reasoning model over tiered pages, greedy, eight thoughts at a time. Prompts are read exactly,
and so is everything up to ``--min-context`` tokens. ``window`` reads the newest pages, ``oracle`` those with
the largest attention in truth. Beside right answers: the share of a thought's tokens before the first that
exact attention would not have written; intervals are over thoughts. Rows that the JSON has are not measured
again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import RESULTS, print_rows, rows_so_far, write_results
from benchmark.sparse.written_thoughts import Thought, pool_tokens, thinking_server, thoughts_of, write_all
from sgl_importance_lab.study.statistics import mean_of

AT_A_TIME = 8
SELECTORS = "oracle,token,bits,quest,infllm,mean,window"


def same_before(written: Sequence[int], exact: Sequence[int]) -> float:
    """Share of the exact tokens before the first that differs."""
    pairs = enumerate(zip(written, exact, strict=False))
    first = next((at for at, (one, other) in pairs if one != other), min(len(written), len(exact)))
    return first / len(exact)


def main(
    length: Annotated[int, typer.Option(help="Tokens of a right thought.")] = 512,
    n: Annotated[int, typer.Option(help="Thoughts.")] = 8,
    selectors: Annotated[str, typer.Option(help="Separated by commas.")] = SELECTORS,
    budgets: Annotated[str, typer.Option(help="Shares of its context that a step reads.")] = "0.4,0.6,0.8",
    min_context: Annotated[int, typer.Option(help="Tokens from which on a step chooses.")] = 128,
    out: Annotated[Path, typer.Option(help="The JSON, with the rows so far.")] = RESULTS
    / "pages_thought_budgets.json",
) -> None:
    rows = rows_so_far(out)
    done = {(row["selector"], row["budget"], row["length"]) for row in rows}
    thoughts = thoughts_of(length, n)
    nothing: list[list[int]] = [[] for _ in thoughts]
    pool = pool_tokens(thoughts, AT_A_TIME)
    exact: list[list[int]] = []
    shares = [float(budget) for budget in budgets.split(",")]
    for selector in track(selectors.split(","), description=f"{length:,} tokens"):
        missing = [share for share in shares if (selector, share, length) not in done]
        if not missing:
            continue
        with thinking_server(
            pool, AT_A_TIME, selector=selector, budget=missing[0], min_context=min_context
        ) as server:
            if not exact:
                found = write_all(server, thoughts, nothing, AT_A_TIME, {"selector": "all"})
                exact = [tokens for tokens, _ in found]
            for share in missing:
                found = write_all(server, thoughts, nothing, AT_A_TIME, {"budget": share})
                pairs = [(tokens, other) for (tokens, _), other in zip(found, exact, strict=True)]
                rights = [thought.is_right(one) for thought, (one, _) in zip(thoughts, pairs, strict=True)]
                rows.append(
                    {
                        "selector": selector,
                        "budget": share,
                        "min_context": min_context,
                        "length": length,
                        "n": len(thoughts),
                        "right": sum(rights),
                        "right exactly": sum(map(Thought.is_right, thoughts, exact)),
                        "same before": asdict(mean_of([same_before(*pair) for pair in pairs])),
                    }
                )
                write_results("pages_thought_budgets", rows, out=out)
    shown = [{**row, "same before": f"{row['same before']['value']:.3f}"} for row in rows]
    print_rows("Right thoughts from chosen pages", shown)


if __name__ == "__main__":
    typer.run(main)
