"""What chosen pages change for a real model: divergence from exact attention on quoted passages, on ordinary
text and on records planted in it, by selector, grain of choice and share of pages read.

    python benchmark/sparse/real_model.py MODEL
    python benchmark/sparse/real_model.py MODEL --tokens 4096 --text agents=TRANSCRIPTS
    python benchmark/sparse/real_model.py MODEL --layout crowded,split,decoys    # records hard to find

All layers choose pages of 16 tokens. No server: the model's own arithmetic in float32 on one thread (any
Llama or Gemma 3; layers with a sliding window read that), the product's selectors and its rule of choice.
Every window of text holds six planted records; behind it the text goes on, passages of it are quoted again,
and the records are asked for. Intervals are bootstraps over windows, differences to ``oracle`` are of the
same windows.
Resumable: each window's rows are appended to ``--measured``, and what stands there is not measured again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Container, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

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
    Exact,
    Grain,
    chosen_answers,
    divergences,
    exact_answers,
    finds,
    of_selector,
)
from benchmark.sparse.real.layouts import LAYOUTS
from benchmark.sparse.real.summary import KINDS, shown, summaries
from benchmark.sparse.real.windows import NoText, Window, default_texts, make_windows, text_at
from sgl_importance_kernels.sparse.bit_tables import KeyStatistics, calibration_tokens
from sgl_importance_kernels.sparse.selectors.mean_and_bits import MeanAndBits
from sgl_importance_kernels.sparse.selectors.selector import Selector
from sgl_importance_lab.selectors.registry import ALL_SELECTORS
from sgl_importance_lab.trained_model.decoder import Decoder, Prefill
from sgl_importance_lab.trained_model.decoder_shape import UnknownModel

PAGE = 16
BF16_BYTES = 2
ARMS = "oracle,token,bits,rep,quest,mean,oracle/head,bits/head"
UNIT_BYTES = 4


def selector_of(name: str, decoder: Decoder) -> Selector:
    """A selector as a server of this model has it.

    Raises:
        typer.BadParameter: there is none of this name.
    """
    if name not in ALL_SELECTORS:
        raise typer.BadParameter(f"no selector {name!r}: choose from {', '.join(ALL_SELECTORS)}")
    selector = ALL_SELECTORS[name](PAGE)
    if isinstance(selector, MeanAndBits):
        known = Prefill(decoder, calibration_tokens(decoder.shape.vocabulary), keeps_queries=True)
        selector.calibrate(KeyStatistics.of(known.keys, known.queries * decoder.shape.dim**-0.5, PAGE))
    return selector


def arm_row(
    decoder: Decoder,
    window: Window,
    prefill: Prefill,
    exact: Sequence[Exact],
    arm: tuple[str, Grain, Estimator],
    share: float,
    layers: Container[int] | None = None,
) -> dict[str, Any]:
    """What choices of one arm change behind a window: mean divergences, and which records are found."""
    name, grain, estimator = arm
    found, read = chosen_answers(
        decoder,
        window,
        prefill,
        exact,
        estimator,
        grain=grain,
        share=share,
        page_size=PAGE,
        layers=layers,
    )
    row: dict[str, Any] = {"selector": name, "grain": grain, "share": share, **asdict(read)}
    for kind in KINDS:
        of_kind = [
            divergences(known.log_probabilities, chosen).mean()
            for task, known, chosen in zip(window.tasks, exact, found, strict=True)
            if task.kind == kind
        ]
        row[kind] = float(torch.stack(of_kind).mean())
    records = [at for at, task in enumerate(window.tasks) if task.kind == "record"]
    row["exact"] = [finds(exact[at].log_probabilities, window.tasks[at]) for at in records]
    row["kept"] = [finds(found[at], window.tasks[at]) for at in records]
    return row


def main(
    model: Annotated[Path, typer.Argument(help="Checkpoint of a Llama or a Gemma 3, as Hugging Face's.")],
    tokens: Annotated[str, typer.Option(help="Of windows, separated by commas.")] = "2048,4096",
    windows: Annotated[int, typer.Option(min=1, help="Of each length and kind of text.")] = 4,
    arms: Annotated[
        str, typer.Option(help="Selectors, separated by commas; with /head each KV head chooses for itself.")
    ] = ARMS,
    share: Annotated[str, typer.Option(help="Of pages that are read, separated by commas.")] = "0.1,0.2",
    layout: Annotated[
        str, typer.Option(help=f"Of planted records, separated by commas: {', '.join(LAYOUTS)}.")
    ] = "spread",
    text: Annotated[
        list[str] | None, typer.Option(help="A further kind of text, NAME=PATH; may be repeated.")
    ] = None,
    measured: Annotated[
        Path, typer.Option(help="Where each window's rows are kept, for a run that goes on.")
    ] = Path("build/real_model.jsonl"),
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    """Measures and writes the results."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    chosen = [
        (float(part), name, cast("Grain", grain or "layer"))
        for part in share.split(",")
        for name, _, grain in (arm.partition("/") for arm in arms.split(","))
    ]
    if unknown := set(layout.split(",")) - set(LAYOUTS):
        raise typer.BadParameter(f"no layout {', '.join(unknown)}: choose from {', '.join(LAYOUTS)}")
    try:
        decoder = Decoder(model)
        further = (kind.partition("=") for kind in text or ())
        texts = default_texts() | {name: text_at(Path(path)) for name, _, path in further}
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        all_windows = [
            window
            for size in map(int, tokens.split(","))
            for each in layout.split(",")
            for name, of_kind in texts.items()
            for window in make_windows(
                tokenizer, name, of_kind, tokens=size, count=windows, page_size=PAGE, layout=each
            )
        ]
        # One of each kind before the second of any: what is cut short has seen all kinds.
        all_windows.sort(key=lambda window: (len(window.tokens), window.number))
    except (UnknownModel, NoText) as error:
        raise typer.BadParameter(str(error)) from error
    names = dict.fromkeys(name for _, name, _ in chosen)
    estimators = {name: of_selector(selector_of(name, decoder)) for name in names}
    rows = [json.loads(line) for line in measured.read_text().splitlines()] if measured.exists() else []
    identity = ("source", "number", "tokens", "layout", "share", "selector", "grain")
    done = {tuple(row[name] for name in identity) for row in rows}
    dim = decoder.shape.dim
    kept = {name: ALL_SELECTORS[name](PAGE).kept_bytes(dim) for name in ALL_SELECTORS}
    kept = {name: size + UNIT_BYTES if size else 0 for name, size in kept.items()}
    measured.parent.mkdir(parents=True, exist_ok=True)
    with Progress() as progress:
        task = progress.add_task("windows", total=len(all_windows))
        for window in all_windows:
            key = {"source": window.source, "number": window.number, "tokens": len(window.tokens)}
            key["layout"] = window.layout
            missing = [arm for arm in chosen if (*key.values(), *arm) not in done]
            if missing:
                prefill = Prefill(decoder, window.tokens)
                exact = exact_answers(decoder, window, prefill)
            for part, name, grain in missing:
                arm = (name, grain, estimators[name])
                rows.append(key | arm_row(decoder, window, prefill, exact, arm, part))
                with measured.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
            found = summaries(rows, kept, kv_bytes=2 * PAGE * dim * BF16_BYTES)
            write_results("pages_real_model", found, out=out)
            progress.advance(task)
    print_rows("Chosen pages of a real model", [shown(row) for row in found])


if __name__ == "__main__":
    typer.run(main)
