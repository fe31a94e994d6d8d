"""What it costs that an answer from chosen pages is computed again, exactly, when it comes back as history.

    python benchmark/sparse/history.py

The embedded model over tiered pages, a twentieth of the context chosen, conversations about a document, one
request at a time. Each turn is asked as it comes, so that the last answer is computed again as history; then
another question takes its place, for which that history is in the cache. Both first tokens are timed in one
run, in which other work on the machine slows them alike; their difference is put beside the whole turn.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import print_rows, write_results
from benchmark.sparse.streamed import streamed
from sgl_importance.embedded_model import checkpoint_path
from sgl_importance_lab.study.statistics import ratio_of

from support.served import script_server
from support.servers import ServerProcess

PAGE, QUESTION_TOKENS = 16, 16
TIERED = (
    *("--kv-policy", "importance", "--kv-residency", "tiered", "--kv-device-tokens", "0.3"),
    *("--kv-sparse-selector", "bits", "--kv-sparse-budget", "0.05", "--max-running-requests", "2"),
    *("--kv-importance-source", "none", "--page-size", str(PAGE), "--skip-tokenizer-init"),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation that has a history.

    Attributes:
        prompt: tokens of it.
        again: of these, tokens of the history that it computed; the other question found them in the cache.
        first: seconds to its first token.
        first_cached: seconds to the other question's first token.
        last: seconds to its last token.
    """

    prompt: int
    again: int
    first: float
    first_cached: float
    last: float


def converse(
    server: ServerProcess, document: Sequence[int], turns: int, answer_tokens: int, draws: random.Random
) -> list[Turn]:
    """The turns behind the first, which has no history."""
    history, found = list(document), []
    for number in range(turns + 1):
        prompt, other = (history + draws.choices(range(10, 1000), k=QUESTION_TOKENS) for _ in range(2))
        answer = streamed(server, prompt, answer_tokens)
        beside = streamed(server, other, 1)
        if number:
            again = beside.cached - answer.cached
            found.append(Turn(len(prompt), again, answer.times[0], beside.times[0], answer.times[-1]))
        history = prompt + answer.output_ids
    return found


def _row(turns: Sequence[Turn], **key: Any) -> dict[str, Any]:
    n = len(turns)
    return {
        **key,
        "turns": n,
        "prompt": sum(each.prompt for each in turns) / n,
        "again": sum(each.again for each in turns) / n,
        "first_ms": 1000 * sum(each.first for each in turns) / n,
        "first_cached_ms": 1000 * sum(each.first_cached for each in turns) / n,
        "turn_ms": 1000 * sum(each.last for each in turns) / n,
        "share": asdict(ratio_of([(each.first - each.first_cached, each.last) for each in turns])),
    }


def main(
    contexts: Annotated[str, typer.Option(help="Tokens of a document, separated by commas.")] = "2048,8192",
    answers: Annotated[str, typer.Option(help="Tokens of an answer, separated by commas.")] = "64,256",
    turns: Annotated[int, typer.Option(min=1, help="Of a conversation, behind the first.")] = 6,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    lengths, sizes = ([int(each) for each in listed.split(",")] for listed in (contexts, answers))
    longest = max(lengths) + (turns + 1) * (max(sizes) + QUESTION_TOKENS)
    draws = random.Random(0)
    rows: list[dict[str, Any]] = []
    with script_server(*TIERED, "--max-total-tokens", str(3 * longest), model=checkpoint_path()) as server:
        for length in lengths:
            for tokens in track(sizes, description=f"{length:,} tokens"):
                found = converse(server, draws.choices(range(10, 1000), k=length), turns, tokens, draws)
                rows.append(_row(found, context=length, answer=tokens))
                write_results("pages_history", rows, out=out)
    shown = [{**row, "share": f"{row['share']['value']:.3f}"} for row in rows]
    print_rows("Answers that are computed again as history", shown)


if __name__ == "__main__":
    typer.run(main)
