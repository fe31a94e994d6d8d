"""Does it pay to learn which pages a thought will want? Loads and processor time of rules that learn.

    pip install --no-deps lightgbm narwhals scipy
    python benchmark/thinking.py
    python benchmark/thought_predictors.py

On the recordings of ``benchmark/thinking.py``, pages of 16: fitted to every second thought, judged by the
others, which load pages when they are wanted. ``logistic`` is the rule of ``study thinking``; ``trees`` are
gradient-boosted ones of LightGBM on the same facts; without ``milestones and logits`` both know nothing of
these. Processor time is that of one thread for each step of a thought, scores of all pages of all heads, in
numpy; other work on the machine lengthens it, so read it beside EMA's. Rules that the JSON has already are
not run again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import RESULTS, print_rows, rows_so_far, write_results
from sgl_importance.terminal import counted
from sgl_importance.trace.page_steps import load_page_steps
from sgl_importance_lab.study.thinking.keep_rules import KEEP_RULES, KeepRule, Scores
from sgl_importance_lab.study.thinking.learned_rule import examples, fit_rule
from sgl_importance_lab.study.thinking.marks import read_marks
from sgl_importance_lab.study.thinking.page_features import page_features
from sgl_importance_lab.study.thinking.page_loads import saved, thoughts_of
from sgl_importance_lab.study.thinking.request_measures import DECISIVE_SHARE, summed
from sgl_importance_lab.study.thinking.rule_run import run_rule
from sgl_importance_lab.study.thinking.wants import Wants

PAGE = 16
BASE = "EMA"
ROUNDS = 100
PARAMETERS = {"objective": "binary", "num_leaves": 31, "num_threads": 1, "verbose": -1, "seed": 0}


@dataclass(frozen=True)
class Trees:
    """Gradient-boosted trees that say whether a page will be wanted within 10 steps."""

    booster: Any

    def __call__(self, wants: Wants) -> Iterator[Scores]:
        for features in page_features(wants):
            table = features.reshape(-1, features.shape[-1])
            yield self.booster.predict(table, raw_score=True).reshape(features.shape[:2])


def fit_trees(requests: Sequence[Wants]) -> Trees:
    import lightgbm

    rows, wanted = zip(*map(examples, requests), strict=True)
    table = lightgbm.Dataset(np.concatenate(rows), np.concatenate(wanted))
    return Trees(lightgbm.train(PARAMETERS, table, num_boost_round=ROUNDS))


@dataclass
class Timed:
    """A rule, with the processor time that its scores take."""

    rule: KeepRule
    seconds: float = 0.0
    steps: int = 0

    def __call__(self, wants: Wants) -> Iterator[Scores]:
        scores = self.rule(wants)
        while True:
            start = time.process_time()
            try:
                found = next(scores)
            except StopIteration:
                return
            finally:
                self.seconds += time.process_time() - start
            self.steps += 1
            yield found


def unmarked(requests: Sequence[Wants]) -> list[Wants]:
    return [replace(each, milestones=None, margins=None) for each in requests]


def main(
    recordings: Annotated[Path, typer.Option(help="Of benchmark/thinking.py.")] = ROOT / "build/thinking",
    out: Annotated[Path, typer.Option(help="The JSON, with the rules so far.")] = RESULTS
    / "thought_predictors.json",
) -> None:
    torch.set_num_threads(1)
    marks = read_marks(recordings / f"marks-{PAGE}.jsonl")
    recording = load_page_steps(recordings / f"thoughts-{PAGE}")
    thoughts = thoughts_of([recording], marks, PAGE, "thought")
    fitted, judged = thoughts[::2], thoughts[1::2]
    fits: dict[str, tuple[Callable[[], KeepRule], bool]] = {
        BASE: (lambda: KEEP_RULES[BASE], True),
        "logistic, without milestones and logits": (lambda: fit_rule(unmarked(fitted)), False),
        "logistic": (lambda: fit_rule(fitted), True),
        "trees, without milestones and logits": (lambda: fit_trees(unmarked(fitted)), False),
        "trees": (lambda: fit_trees(fitted), True),
    }
    loads: dict[str, list[tuple[float, float]]] = {}
    rows = rows_so_far(out)
    known = {row["rule"] for row in rows}
    for name, (fit, is_marked) in fits.items():
        if name in known and name != BASE:
            continue  # every rule is compared with the first, request by request
        timed = Timed(fit())
        with counted(name, len(judged)) as advance:
            for wants in judged if is_marked else unmarked(judged):
                (run,) = run_rule(wants, timed, [DECISIVE_SHARE])
                loads.setdefault(name, []).append(summed(run.misses))
                advance()
        if name in known:
            continue
        fewer = saved(loads[name], loads[BASE])
        rows.append(
            {
                "rule": name,
                "thoughts": len(judged),
                "loaded": sum(one for one, _ in loads[name]) / sum(read for _, read in loads[name]),
                "fewer than EMA": fewer.value,
                "low": fewer.low,
                "high": fewer.high,
                "us per step": 1e6 * timed.seconds / timed.steps,
                "pages per step": float(np.mean([wants.num_pages.mean() for wants in judged])),
                "heads": judged[0].num_heads,
            }
        )
        write_results("thought_predictors", rows, out=out)
    print_rows("rules that learn", rows)


if __name__ == "__main__":
    typer.run(main)
