"""What a trained model's attention keeps where pages are copied ahead of the step that chooses them.

    python benchmark/real_model/ahead.py --model .cache/models/smollm2

No server: the model's own arithmetic in float32 on one thread, windows of text, and two continuations of each
that are given: the text goes on, and a passage of it stands there again. Every layer chooses pages of 16
tokens. ``exact`` reads its choice, the other orders (``benchmark/sparse/real/orders.py``) what could be
copied behind other work. Intervals are bootstraps over windows. Each window's rows are kept in
``--measured``, and what stands there is not measured again.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]
# ruff: noqa: E402
from benchmark.results import print_rows, write_results
from benchmark.sparse.real.choosing import (
    Estimator,
    chosen_answers,
    divergences,
    exact_answers,
    of_selector,
)
from benchmark.sparse.real.orders import Covered, LastLayer, Order, Ordered, Resident, exact, last_step
from benchmark.sparse.real.windows import NoText, Task, Window, default_texts, make_windows
from benchmark.sparse.real_model import PAGE, selector_of
from sgl_importance_lab.study.statistics import Estimate, mean_of, ratio_of
from sgl_importance_lab.trained_model.decoder import Decoder, Prefill
from sgl_importance_lab.trained_model.decoder_shape import UnknownModel

KINDS = ("plain", "quoted")
ORDERS = ("exact", "last step", "last layer", "resident")
SLOTS = 2.0
"""Pages of a layer that the device holds, in those that a token reads; what is missing of twice as many is
counted, too."""


def orders(budget_pages: int) -> dict[str, Order]:
    slots = int(SLOTS * budget_pages)
    return dict(zip(ORDERS, (exact, last_step, LastLayer(), Resident(slots)), strict=True))


def continued(window: Window, tokens: int, scored: int) -> Window:
    """The first ``tokens`` of a window, and two continuations of ``scored`` tokens: its own, a quotation."""
    text = window.tokens.tolist()
    draws = random.Random(f"{window.source} {window.number} {tokens}")
    at = draws.randrange(int(0.7 * tokens))
    tasks = [
        Task(kind, (first,), tuple(rest))
        for kind, (first, *rest) in (
            ("plain", text[tokens : tokens + scored + 1]),
            ("quoted", text[at : at + scored + 1]),
        )
    ]
    return Window(window.source, window.number, window.tokens[:tokens], tuple(tasks))


def measured_rows(
    decoder: Decoder, window: Window, estimator: Estimator, shares: Sequence[float]
) -> list[dict[str, Any]]:
    """A row for each share and order."""
    prefill = Prefill(decoder, window.tokens)
    known = exact_answers(decoder, window, prefill)
    size, rows = len(window.tokens), []
    starts = [size for _ in window.tasks]
    key = {"source": window.source, "number": window.number, "tokens": size}
    for share in shares:
        budget = int(share * size / PAGE)

        def answers(reads: Covered | Ordered, share: float = share) -> list[torch.Tensor]:
            return chosen_answers(
                decoder,
                window,
                prefill,
                known,
                estimator,
                grain="layer",
                share=share,
                page_size=PAGE,
                reads=reads,
            )[0]

        resident, roomy = (Resident(int(times * SLOTS * budget)) for times in (1, 2))
        covered = Covered(orders(budget) | {"resident": resident, "roomy": roomy}, starts, PAGE)
        answers(covered)
        for name, order in orders(budget).items():
            found = answers(Ordered(order, starts, PAGE))
            row = key | {"share": share, "order": name, "mass": covered.mass[name], "total": covered.total}
            row |= {"chosen": covered.chosen, "again": covered.again}
            row |= {"read": resident.chosen, "missing": resident.missing, "named": resident.named}
            row["missing_of_twice"] = roomy.missing
            for task, own, other in zip(window.tasks, known, found, strict=True):
                row[task.kind] = float(divergences(own.log_probabilities, other)[1:].mean())
            rows.append(row)
    return rows


def summaries(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each length, share and order, beside the exact order on the same windows."""
    found = []
    for tokens, share, order in dict.fromkeys((r["tokens"], r["share"], r["order"]) for r in rows):
        of_order, of_exact = (
            [r for r in rows if (r["tokens"], r["share"], r["order"]) == (tokens, share, name)]
            for name in (order, "exact")
        )
        pairs = list(zip(of_order, of_exact, strict=True))
        assert all(a["source"] == b["source"] and a["number"] == b["number"] for a, b in pairs)
        numbers: dict[str, Estimate] = {
            "covered": ratio_of([(row["mass"], row["total"]) for row in of_order]),
            "of_exact": ratio_of([(row["mass"], other["mass"]) for row, other in pairs]),
            "chosen_again": ratio_of([(row["again"], row["chosen"]) for row in of_order]),
            "missing": ratio_of([(row["missing"], row["read"]) for row in of_order]),
            "missing_of_twice": ratio_of([(row["missing_of_twice"], row["read"]) for row in of_order]),
            "named": ratio_of([(row["named"], row["missing"]) for row in of_order]),
        }
        for kind in KINDS:
            numbers[kind] = mean_of([row[kind] for row in of_order])
            numbers[f"{kind}_of_exact"] = ratio_of([(row[kind], other[kind]) for row, other in pairs])
        row = {"tokens": tokens, "share": share, "order": order, "windows": len(of_order)}
        found.append(row | {name: asdict(value) for name, value in numbers.items()})
    return found


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint of the Llama architecture, as Hugging Face's.")],
    tokens: Annotated[str, typer.Option(help="Of windows, separated by commas.")] = "2048,4096",
    windows: Annotated[int, typer.Option(min=1, help="Of each length and kind of text.")] = 2,
    scored: Annotated[int, typer.Option(min=2, help="Tokens of each continuation.")] = 64,
    selector: Annotated[str, typer.Option(help="As --kv-sparse-selector.")] = "bits",
    share: Annotated[str, typer.Option(help="Of pages that are read, separated by commas.")] = "0.1,0.2",
    measured: Annotated[Path, typer.Option(help="Where each window's rows are kept.")] = Path(
        "build/copies_ahead.jsonl"
    ),
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    """Measures and writes the results."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    shares = [float(each) for each in share.split(",")]
    try:
        decoder = Decoder(model)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        all_windows = [
            continued(window, size, scored)
            for size in map(int, tokens.split(","))
            for name, text in default_texts().items()
            for window in make_windows(
                tokenizer, name, text, tokens=size + scored + PAGE, count=windows, page_size=PAGE
            )
        ]
    except (UnknownModel, NoText) as error:
        raise typer.BadParameter(str(error)) from error
    # One of each kind before the second of any: what is cut short has seen all kinds.
    all_windows.sort(key=lambda window: (window.number, len(window.tokens)))
    estimator = of_selector(selector_of(selector, decoder))
    rows = [json.loads(line) for line in measured.read_text().splitlines()] if measured.exists() else []
    done = {(row["source"], row["number"], row["tokens"]) for row in rows}
    measured.parent.mkdir(parents=True, exist_ok=True)
    with Progress() as progress:
        task = progress.add_task("windows", total=len(all_windows))
        for window in all_windows:
            if (window.source, window.number, len(window.tokens)) not in done:
                new = measured_rows(decoder, window, estimator, shares)
                rows += new
                with measured.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in new)
            found = summaries(rows)
            write_results("copies_ahead", found, out=out)
            progress.advance(task)
    shown = [
        {name: value["value"] if isinstance(value, dict) else value for name, value in row.items()}
        for row in found
    ]
    print_rows("Copies ahead", shown)


if __name__ == "__main__":
    typer.run(main)
