"""What `sparse.prune` saves and loses on a real model, beside smaller budgets that read as much.

    python benchmark/sparse/prune.py .cache/models/smollm2

`bits` chooses for each layer of 30, pages of 16, at most a fifth of 1,024 tokens; windows and tasks are those
of `real_model.py`. Resumable: rows of a window are appended to ``--measured``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]
# ruff: noqa: E402
from benchmark.results import write_results
from benchmark.sparse.real import choosing
from benchmark.sparse.real.windows import default_texts, make_windows
from benchmark.sparse.real_model import PAGE, arm_row, selector_of
from sgl_importance.sparse.selection_rule import SINK_TOKENS, WINDOW_TOKENS
from sgl_importance_kernels.sparse.page_choice import ChoiceRule
from sgl_importance_lab.study.statistics import mean_of
from sgl_importance_lab.trained_model.decoder import Decoder, Prefill

# Budget, top_p, least_share.
ARMS = {
    "budget 0.20": (0.2, 1.0, 0.0),
    "topp:0.9": (0.2, 0.9, 0.0),
    "topp:0.7": (0.2, 0.7, 0.0),
    "topp:0.5": (0.2, 0.5, 0.0),
    "blasst:0.01": (0.2, 1.0, 0.01),
    "blasst:0.1": (0.2, 1.0, 0.1),
    "budget 0.15": (0.15, 1.0, 0.0),
    "budget 0.12": (0.12, 1.0, 0.0),
    "budget 0.10": (0.1, 1.0, 0.0),
}


def main(
    model: Annotated[Path, typer.Argument()],
    windows: Annotated[int, typer.Option(help="Of each kind of text.")] = 2,
    measured: Annotated[Path, typer.Option()] = Path("build/prune.jsonl"),
    out: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Measures and writes the results."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    decoder = Decoder(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    made = [
        window
        for name, text in default_texts().items()
        for window in make_windows(tokenizer, name, text, tokens=1024, count=windows, page_size=PAGE)
    ]
    made.sort(key=lambda window: window.number)
    estimator = choosing.of_selector(selector_of("bits", decoder))
    rows: list[dict[str, Any]] = []
    if measured.exists():
        rows = [json.loads(line) for line in measured.read_text().splitlines()]
    done = {(row["source"], row["number"]) for row in rows}
    for window in track(made, "windows"):
        if (window.source, window.number) in done:
            continue
        prefill = Prefill(decoder, window.tokens)
        exact = choosing.exact_answers(decoder, window, prefill)
        of_window = []
        for name, (share, top_p, least_share) in ARMS.items():
            choosing.RULE = ChoiceRule(SINK_TOKENS, WINDOW_TOKENS, top_p=top_p, least_share=least_share)
            row = arm_row(decoder, window, prefill, exact, ("bits", "layer", estimator), share)
            of_window.append({"source": window.source, "number": window.number, "arm": name, **row})
        rows += of_window
        with measured.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in of_window)
        write_results("pages_prune", summary(rows), out=out)
    write_results("pages_prune", summary(rows), out=out)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each arm, what was read and lost, means over windows with their intervals."""
    found = []
    for arm in ARMS:
        of_arm = [row for row in rows if row["arm"] == arm]
        each: dict[str, Any] = {"arm": arm, "windows": len(of_arm)}
        each["read"] = asdict(mean_of([row["chosen"] / row["pages"] for row in of_arm]))
        each |= {
            kind: asdict(mean_of([row[kind] for row in of_arm])) for kind in ("quoted", "plain", "record")
        }
        each["records"] = sum(sum(row["exact"]) for row in of_arm)
        pairs = [zip(row["exact"], row["kept"], strict=True) for row in of_arm]
        each["records_kept"] = sum(exact and kept for pair in pairs for exact, kept in pair)
        found.append(each)
    return found


if __name__ == "__main__":
    typer.run(main)
