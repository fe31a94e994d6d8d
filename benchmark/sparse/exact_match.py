"""Do answers survive when steps read a small part of their context? Exact match, embedded model, served.

    python benchmark/sparse/exact_match.py

A tiered server for each selector. Every question is asked twice, exactly (the hint ``selector: all``) and
from chosen pages; the last tokens of the prompt, with the question, select as the answer does. ``multi-key``:
many questions about each document, which is cached after the first; ``single-needle``: a document for each.
Resumable: rows that ``--out`` holds already, of the same arguments, are not measured again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import RESULTS, print_rows, rows_so_far, write_results
from sgl_importance.embedded_model import checkpoint_path
from sgl_importance_lab.probe.tasks import make_document, make_task

from support.served import script_server
from support.servers import ServerProcess

EXACT = {"kv_hints": {"selector": "all"}}
ANSWER_TOKENS = 8
QUESTION_TOKENS = 16
"""Last tokens of a prompt that select: the question, and what the chat template puts behind it."""

Question = tuple[list[dict[str, str]], str]


def multi_key(length: int, n: int, per_document: int) -> Iterator[Question]:
    """Questions about documents with about a record per 24 tokens."""
    for seed in range(-(-n // per_document)):
        document = make_document(length - 64, seed)
        for name in list(document.records)[:: max(1, len(document.records) // per_document)][:per_document]:
            yield document.messages(name), document.records[name]


def single_needle(length: int, n: int) -> Iterator[Question]:
    """One record in a text, half of them of a name that training never saw."""
    for seed in range(n):
        task = make_task("single-needle", length, seed, unseen_name=seed % 2 == 1)
        yield task.messages, task.answer


def asked(server: ServerProcess, questions: list[Question], label: str) -> dict[str, Any]:
    """How many answers were right, exactly and from chosen pages."""
    exact = sparse = same = 0
    for messages, answer in track(questions, description=label):
        dense_text, sparse_text = (
            server.chat(messages, max_tokens=ANSWER_TOKENS, **extra)["choices"][0]["message"][
                "content"
            ].strip()
            for extra in (EXACT, {})
        )
        exact += dense_text == answer
        sparse += sparse_text == answer
        same += dense_text == sparse_text
    n = len(questions)
    return {"n": n, "dense": exact / n, "sparse": sparse / n, "same": same / n}


def main(
    selectors: Annotated[
        str, typer.Option(help="Separated by commas.")
    ] = "bits,quest,infllm,mean,window,token,oracle",
    lengths: Annotated[
        str, typer.Option(help="Tokens of a prompt, separated by commas.")
    ] = "2048,4096,8192,16384",
    budgets: Annotated[str, typer.Option(help="As --kv-sparse-budget, separated by commas.")] = "0.05",
    tasks: Annotated[
        str, typer.Option(help="multi-key, single-needle, or both.")
    ] = "multi-key,single-needle",
    n: Annotated[int, typer.Option(help="Questions of a cell.")] = 200,
    per_document: Annotated[int, typer.Option(help="Questions about a document of multi-key.")] = 50,
    needles: Annotated[int, typer.Option(help="Documents of a cell of single-needle.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    path = out or RESULTS / "pages_exact_match.json"
    rows = rows_so_far(path)
    done = {(row["selector"], row["budget"], row["task"], row["length"], row["n"]) for row in rows}
    for selector in selectors.split(","):
        for budget in budgets.split(","):
            cells = [
                (task, length, n if task == "multi-key" else needles)
                for task in tasks.split(",")
                for length in map(int, lengths.split(","))
            ]
            missing = [cell for cell in cells if (selector, float(budget), *cell) not in done]
            if not missing:
                continue
            flags = (
                *("--kv-policy", "importance", "--kv-residency", "tiered", "--kv-device-tokens", "0.6"),
                *(
                    "--kv-sparse-selector",
                    selector,
                    "--kv-sparse-budget",
                    budget,
                    "--max-running-requests",
                    "4",
                ),
                *("--kv-sparse-prompt-tokens", str(QUESTION_TOKENS), "--max-total-tokens", "40000"),
            )
            with script_server(*flags, model=checkpoint_path()) as server:
                for task, length, count in missing:
                    questions = list(
                        multi_key(length, count, per_document)
                        if task == "multi-key"
                        else single_needle(length, count)
                    )
                    found = asked(server, questions, f"{selector} {budget} {task} {length}")
                    key = {"selector": selector, "budget": float(budget), "task": task, "length": length}
                    rows.append({**key, **found})
                    write_results("pages_exact_match", rows, out=path)
    print_rows("Exact match", rows)


if __name__ == "__main__":
    typer.run(main)
