"""What is left of thoughts when KV that falls behind is written in fewer bits: milestones whole, or not.

    python benchmark/eviction/demotion.py

The embedded reasoning model in transformers, greedy. Each head keeps the tokens with the largest average
attention whole; what falls behind them is quantised for good, but is still read. Arms, at the same bits:
``uniform`` quantises everything there; ``milestones whole`` spares the tokens that state a value, a push or a
pop; ``random whole`` spares as many others of the thought; ``prompt whole`` spares the prompt. Bytes are
those of KV at the end of right answers, of bfloat16's. A thought ends with its first wrong token.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]
# ruff: noqa: E402
from benchmark.eviction.answers import THOUGHT, Asked, Kind
from benchmark.eviction.retention import ByRule, Demoting, live_wants
from benchmark.results import RESULTS, print_rows, rows_so_far, write_results
from sgl_importance.terminal import counted
from sgl_importance_lab.reasoner.milestones import milestones
from sgl_importance_lab.study.statistics import mean_of
from sgl_importance_lab.study.thinking.keep_rules import KEEP_RULES
from sgl_importance_lab.study.thinking.wants import Bools

UNIFORM, MILESTONES, RANDOM, PROMPT = "uniform", "milestones whole", "random whole", "prompt whole"
ARMS = (UNIFORM, MILESTONES, RANDOM)
WHOLE_BITS, SCALE_BITS = 16, 16


def spared(asked: Asked, arm: str) -> Bools:
    """Tokens that keep their precision; bool [tokens]."""
    assert asked.task is not None
    prompt, thought = len(asked.prompt), asked.task.solution.thought
    found = np.zeros(prompt + len(asked.right), np.bool_)
    states = [prompt + 1 + at for at in milestones(thought)]  # behind <think>
    if arm == MILESTONES:
        found[states] = True
    elif arm == RANDOM:
        others = sorted(set(range(prompt + 1, len(found))) - set(states))
        found[random.Random(asked.rid).sample(others, min(len(states), len(others)))] = True
    elif arm == PROMPT:
        found[:prompt] = True
    return found


def share_of_bytes(asked: Asked, demoting: Demoting, dim: int) -> float:
    """KV at the end, of what bfloat16 takes; each key and each value has a scale of its own."""
    whole = (len(asked.prompt) + len(asked.right)) * demoting.live.num_heads * dim * WHOLE_BITS
    saved = demoting.demoted * (dim * (WHOLE_BITS - demoting.bits) - SCALE_BITS)
    return 1 - saved / whole


def main(
    bits: Annotated[str, typer.Option(help="Of what falls behind, separated by commas.")] = "8,4,3,2",
    kept: Annotated[float, typer.Option(help="Share of a context that each head keeps whole.")] = 0.2,
    length: Annotated[int, typer.Option(help="Tokens of a thought.")] = 1024,
    n: Annotated[int, typer.Option(min=2, help="Thoughts of a cell.")] = 20,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    out: Annotated[Path, typer.Option(help="The JSON, with the cells so far.")] = RESULTS
    / "thought_demotion.json",
) -> None:
    torch.set_num_threads(threads)
    kind = Kind(THOUGHT)
    asked = kind.asked(length, range(n))
    rows = rows_so_far(out)
    for each_bits in map(int, bits.split(",")):
        for arm in ARMS:
            if (each_bits, arm) in {(row["bits"], row["arm"]) for row in rows}:
                continue
            demoting = []
            for each in asked:
                tokens = len(each.prompt) + len(each.right)
                live = live_wants(each.rid, len(each.prompt), len(each.right), 1, kind.heads)
                ranking = ByRule(KEEP_RULES["EMA"])
                budget = math.ceil(kept * tokens)
                demoting.append(Demoting(ranking, live, budget, bits=each_bits, spared=spared(each, arm)))
            with counted(f"{each_bits} bits, {arm}", max(len(e.right) for e in asked)) as advance:
                found = kind.answers(asked, demoting, advance)
            parts = [each.right_before(tokens) for each, tokens in zip(asked, found, strict=True)]
            before = mean_of(parts)
            # What a wrong answer takes says little: it ends early.
            whole = [
                share_of_bytes(each, one, kind.model.config.head_dim)
                for each, one, part in zip(asked, demoting, parts, strict=True)
                if part == 1
            ]
            rows.append(
                {
                    "bits": each_bits,
                    "arm": arm,
                    "n": len(asked),
                    "right": sum(part == 1 for part in parts) / len(parts),
                    "right before": before.value,
                    "low": before.low,
                    "high": before.high,
                    "bytes": float(np.mean(whole)) if whole else None,
                    "by thought": [round(part, 4) for part in parts],
                }
            )
            write_results("thought_demotion", rows, out=out)
    print_rows("thoughts while KV loses precision", rows)


if __name__ == "__main__":
    typer.run(main)
