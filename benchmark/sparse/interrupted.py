"""How far does a thought that was interrupted agree with one that was not, where steps read chosen pages?

    python benchmark/sparse/interrupted.py

The embedded reasoning model over tiered pages. Each thought is written without interruption first, then

- *retracted*: by a server that takes one of four back every 67 steps (``SGLANG_TEST_RETRACT`` of sglang),
  computes what it had said once more, and goes on;
- *asked again* behind a quarter, a half and three quarters of its tokens, as a client does whose server is
  gone: what was said is part of the prompt then, and is read exactly.

The cache is empty at first, as if every page in it had been lost. Agreement is the share of the tokens behind
the interruption (of a retraction: of all) that are those of the thought without one, place by place;
intervals are over thoughts. Selector ``all`` is the control. Rows that the JSON has are not measured again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import RESULTS, print_rows, rows_so_far, write_results
from benchmark.sparse.written_thoughts import Thought, pool_tokens, thinking_server, thoughts_of, write_all
from sgl_importance_lab.study.statistics import mean_of

AT_A_TIME, RETRACTED_EVERY = 4, 67
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(RETRACTED_EVERY)}
ASKED_AGAIN = (0.25, 0.5, 0.75)
ARMS = "token:0.6,token:0.4,rep:0.4,all:1"


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A thought that was interrupted, beside itself without interruption.

    Attributes:
        thought: which.
        alone: output ids without interruption.
        written: with.
        start: how many of them were there before the interruption, or may have been written before it.
    """

    thought: Thought
    alone: list[int]
    written: list[int]
    start: int = 0

    @property
    def agreement(self) -> float:
        """Share of the tokens from the start on that are the same."""
        expected, found = self.alone[self.start :], self.written[self.start :]
        return sum(one == other for one, other in zip(found, expected, strict=False)) / len(expected)

    @property
    def is_same(self) -> bool:
        return self.written == self.alone


def measure(thoughts: Sequence[Thought], **choice: Any) -> Iterator[dict[str, Any]]:
    """A row for each way of being interrupted, under a choice of pages."""
    nothing: list[list[int]] = [[] for _ in thoughts]
    pool = pool_tokens(thoughts, AT_A_TIME)
    with thinking_server(pool, AT_A_TIME, **choice) as server:
        alone = [written for written, _ in write_all(server, thoughts, nothing, AT_A_TIME)]
        for share in ASKED_AGAIN:
            said = [own[: int(share * len(own))] for own in alone]
            again = write_all(server, thoughts, said, AT_A_TIME)
            parts = zip(thoughts, alone, again, said, strict=True)
            yield _row(
                f"asked again behind {share:.0%}",
                [
                    Interrupted(thought, own, written, len(before))
                    for thought, own, (written, _), before in parts
                ],
            )
    with thinking_server(pool, AT_A_TIME, **choice, env=RETRACTING) as server:
        retracted = write_all(server, thoughts, nothing, AT_A_TIME)
    those = [
        Interrupted(thought, own, written)
        for thought, own, (written, retractions) in zip(thoughts, alone, retracted, strict=True)
        if retractions
    ]
    yield {**_row("retracted", those), "retractions": sum(retractions for _, retractions in retracted)}


def _row(how: str, those: Sequence[Interrupted]) -> dict[str, Any]:
    assert those, how
    return {
        "interruption": how,
        "n": len(those),
        "agreement": asdict(mean_of([each.agreement for each in those])),
        "same to the end": sum(each.is_same for each in those),
        "right without": sum(each.thought.is_right(each.alone) for each in those),
        "right": sum(each.thought.is_right(each.written) for each in those),
        "by_thought": [
            {"tokens": len(each.alone), "start": each.start, "agreement": each.agreement} for each in those
        ],
    }


def main(
    lengths: Annotated[str, typer.Option(help="Tokens of a right thought.")] = "512,1024",
    n: Annotated[int, typer.Option(min=2, help="Thoughts of each length.")] = 12,
    arms: Annotated[
        str, typer.Option(help="Selectors, each with the share of its context that a step reads.")
    ] = ARMS,
    min_context: Annotated[int, typer.Option(help="Tokens from which on a step chooses.")] = 128,
    out: Annotated[Path, typer.Option(help="The JSON, with the rows so far.")] = RESULTS
    / "pages_interrupted.json",
) -> None:
    rows = rows_so_far(out)
    done = {(row["selector"], row["budget"], row["length"]) for row in rows}
    for length in map(int, lengths.split(",")):
        thoughts = thoughts_of(length, n)
        for arm in track(arms.split(","), description=f"{length:,} tokens"):
            selector, budget = arm.split(":")
            if (selector, float(budget), length) in done:
                continue
            choice = {"selector": selector, "budget": float(budget), "min_context": min_context}
            rows += [{**choice, "length": length, **row} for row in measure(thoughts, **choice)]
            write_results("pages_interrupted", rows, out=out)
    names = ("selector", "length", "interruption", "n", "same to the end", "right without", "right")
    shown = [
        {**{name: str(row[name]) for name in names}, "agreement": f"{row['agreement']['value']:.3f}"}
        for row in rows
    ]
    print_rows("Thoughts that were interrupted", shown)


if __name__ == "__main__":
    typer.run(main)
