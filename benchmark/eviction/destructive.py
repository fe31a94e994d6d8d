"""What is left of the answers when a rule lets KV go for good: thoughts beside normal decode, at a budget.

    python benchmark/eviction/destructive.py

The embedded models in transformers, greedy. Every head of every layer keeps a share of prompt and right
answer, chosen by the rule after each step among the tokens of both; what it lets go is gone. An answer ends
with its first wrong token; those that are wrong without eviction are left out. The oracle keeps what an
answer without eviction would attend to most. The learned rule was fitted to other instances. Cells that the
results have are not run again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from itertools import compress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]
# ruff: noqa: E402
from benchmark.eviction.answers import DECODE, THOUGHT, Asked, Kind, Watching
from benchmark.eviction.retention import (
    RKV,
    ByPlan,
    ByRule,
    Evicting,
    Ranking,
    live_wants,
    most_to_come,
)
from benchmark.results import RESULTS, print_rows, rows_so_far, write_results
from sgl_importance.terminal import counted
from sgl_importance_lab.study.statistics import mean_of
from sgl_importance_lab.study.thinking.keep_rules import KEEP_RULES
from sgl_importance_lab.study.thinking.learned_rule import LearnedRule, fit_rule
from sgl_importance_lab.study.thinking.wants import Wants

ORACLE, LEARNED, WHOLE = "oracle", "learned", "everything kept"
FIRST_FITTED = 1000  # seeds that no cell asks


def rankings(name: str, wants: Sequence[Wants], learned: LearnedRule | None) -> list[Ranking]:
    """One for each answer. ``wants``: of the answers without eviction."""
    if name == ORACLE:
        return [ByPlan(most_to_come(each)) for each in wants]
    if name == "R-KV":
        return [RKV() for _ in wants]
    if name == LEARNED:
        assert learned is not None
        return [ByRule(learned) for _ in wants]
    return [ByRule(KEEP_RULES[name]) for _ in wants]


def watched(kind: Kind, asked: Sequence[Asked], page: int) -> tuple[list[list[int]], list[Wants]]:
    """Answers without eviction, and what they wanted."""
    watchers = [Watching(_live(kind, each, page)) for each in asked]
    with counted(f"{kind.name}: without eviction", max(len(each.right) for each in asked)) as advance:
        found = kind.answers(asked, watchers, advance)
    return found, [one.wants(len(tokens)) for one, tokens in zip(watchers, found, strict=True)]


def _live(kind: Kind, asked: Asked, page: int) -> Wants:
    return live_wants(asked.rid, len(asked.prompt), len(asked.right), page, kind.heads)


def cells_of(
    kind: Kind, page: int, shares: Sequence[float], rules: Sequence[str], length: int, n: int,
    done: Callable[[str, float], bool],
) -> Any:  # fmt: skip
    """Rows of a kind, as they are found."""
    asked = kind.asked(length, range(n))
    if all(done(rule, share) for rule in rules for share in shares):
        return
    answers, wants = watched(kind, asked, page)
    parts = [each.right_before(found) for each, found in zip(asked, answers, strict=True)]
    if not done(WHOLE, 1.0):
        yield row_of(kind, page, WHOLE, 1.0, parts, 0)
    is_right = [part == 1 for part in parts]
    asked, wants = list(compress(asked, is_right)), list(compress(wants, is_right))
    learned = None
    if LEARNED in rules:
        _, fitted = watched(kind, kind.asked(length, range(FIRST_FITTED, FIRST_FITTED + 6)), page)
        learned = fit_rule(fitted)
    for share in shares:
        for name in rules:
            if done(name, share):
                continue
            evicting = [
                Evicting(ranking, _live(kind, each, page), pages_of(each, share, page))
                for each, ranking in zip(asked, rankings(name, wants, learned), strict=True)
            ]
            with counted(f"{kind.name}: {name}, {share:.0%}", max(len(e.right) for e in asked)) as advance:
                found = kind.answers(asked, evicting, advance)
            parts = [each.right_before(tokens) for each, tokens in zip(asked, found, strict=True)]
            yield row_of(kind, page, name, share, parts, sum(each.evicted for each in evicting))


def pages_of(asked: Asked, share: float, page: int) -> int:
    """That a head keeps."""
    return math.ceil(share * (len(asked.prompt) + len(asked.right)) / page)


def row_of(
    kind: Kind, page: int, rule: str, share: float, parts: Sequence[float], evicted: int
) -> dict[str, Any]:
    before = mean_of(parts)
    return {
        "kind": kind.name,
        "page": page,
        "kept": share,
        "rule": rule,
        "n": len(parts),
        "right": sum(part == 1 for part in parts) / len(parts),
        "right before": before.value,
        "low": before.low,
        "high": before.high,
        "evicted": evicted,
    }


def main(
    kinds: Annotated[str, typer.Option(help="Separated by commas.")] = f"{THOUGHT},{DECODE}",
    pages: Annotated[str, typer.Option(help="Tokens of a page.")] = "16",
    shares: Annotated[str, typer.Option(help="Of a context that each head keeps.")] = "0.2,0.4,0.6",
    rules: Annotated[str, typer.Option(help="Separated by commas; all where none is named.")] = "",
    length: Annotated[int, typer.Option(help="Tokens of a thought, and of a text.")] = 1024,
    n: Annotated[int, typer.Option(min=2, help="Answers of a cell.")] = 20,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    out: Annotated[Path, typer.Option(help="The JSON, with the cells so far.")] = RESULTS
    / "thought_evictions.json",
) -> None:
    torch.set_num_threads(threads)
    named = rules.split(",") if rules else [*KEEP_RULES, "R-KV", LEARNED]
    rows = rows_so_far(out)
    for name in kinds.split(","):
        kind = Kind(name)
        for page in map(int, pages.split(",")):
            known = {(row["rule"], row["kept"]) for row in rows if (row["kind"], row["page"]) == (name, page)}
            sizes = [float(share) for share in shares.split(",")]
            for row in cells_of(kind, page, sizes, named, length, n, lambda *cell: cell in known):  # noqa: B023
                rows.append(row)
                write_results("thought_evictions", rows, out=out)
    print_rows("answers while KV is let go", rows)


if __name__ == "__main__":
    typer.run(main)
