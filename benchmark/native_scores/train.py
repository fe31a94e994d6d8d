"""Trains indexers for layers of a frozen model, as DeepSeek Sparse Attention begins: by the divergence
of its softmax from the model's attention, summed over heads.

    python benchmark/native_scores/train.py MODEL --text agents=TRANSCRIPTS

Learned from: the first 60 % of each text, two kinds left out altogether. ``judge.py`` tries the last 30 %.
Sinks and each query's latest tokens are always read, so neither side counts them. Everything is made in
``--cache`` (133 MB a passage for SmolLM2-135M) and resumes: passages and layers that stand there are not made
again.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
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
from benchmark.native_scores.indexer import IndexerShape
from benchmark.native_scores.teacher import FIRST_ROW, WatchedDecoder, read_lesson, write_lesson
from benchmark.native_scores.texts import passages
from benchmark.native_scores.training import train_layer
from benchmark.sparse.real.windows import NoText, default_texts, text_at
from sgl_importance_lab.trained_model.decoder_shape import UnknownModel

OF_KIND = 12
"""Passages that each text is divided into; how many are learned from is for ``--lessons`` to say."""
ROWS = 512
HELD_OUT = 1
"""Last passages, which only tell how well the others were learned from."""


def write_lessons(decoder: WatchedDecoder, found: list[tuple[str, torch.Tensor]], folder: Path) -> list[Path]:
    """Writes those that are not there; returns all."""
    paths = [folder / f"{name}.safetensors" for name, _ in found]
    with Progress() as progress:
        for number, (path, (_, tokens)) in enumerate(
            zip(progress.track(paths, description="passages"), found, strict=True)
        ):
            if path.exists():
                continue
            draws = torch.Generator().manual_seed(number)
            rows = FIRST_ROW + torch.randperm(len(tokens) - FIRST_ROW, generator=draws)[:ROWS].sort().values
            write_lesson(decoder, tokens, rows, path)
    return paths


def json_lines(path: Path) -> list[dict[str, Any]]:
    """What lines of JSON say, so far; nothing where there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(
    model: Annotated[Path, typer.Argument(help="Checkpoint of the Llama architecture, as Hugging Face's.")],
    dim: Annotated[int, typer.Option(help="Dimensions of an indexer's key; a power of two.")] = 32,
    heads: Annotated[int, typer.Option(help="Queries of an indexer.")] = 8,
    lessons: Annotated[int, typer.Option(min=HELD_OUT + 1, help="Passages to learn from, in all.")] = 7,
    tokens: Annotated[int, typer.Option(help="Of a passage.")] = 2048,
    steps: Annotated[int, typer.Option(help="For each layer.")] = 120,
    seed: Annotated[int, typer.Option(help="Of weights and draws.")] = 0,
    every: Annotated[int, typer.Option(min=1, help="Only every Nth layer, from the first on.")] = 3,
    part: Annotated[
        str, typer.Option(help="K/N: every Nth of these from the Kth on, for N processes at once.")
    ] = "0/1",
    text: Annotated[
        list[str] | None, typer.Option(help="A further kind of text, NAME=PATH; may be repeated.")
    ] = None,
    cache: Annotated[Path, typer.Option(help="Where passages and indexers are made.")] = Path(
        ".cache/native_scores"
    ),
) -> None:
    """Writes the passages, then trains layer by layer."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    try:
        decoder = WatchedDecoder(model)
        further = (kind.partition("=") for kind in text or ())
        texts = default_texts() | {name: text_at(Path(path)) for name, _, path in further}
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        found = list(itertools.islice(passages(tokenizer, texts, tokens=tokens, count=OF_KIND), lessons))
    except (UnknownModel, NoText) as error:
        raise typer.BadParameter(str(error)) from error
    paths = write_lessons(decoder, found, cache / "lessons")
    layers = range(0, decoder.shape.layers, every)
    shape = IndexerShape(read_lesson(paths[0], 0)[0].shape[1], heads, dim, decoder.shape.theta)
    folder = cache / f"dim{dim}"
    told = folder / "layers.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    first, _, stride = part.partition("/")
    done = {row["layer"] for row in json_lines(told)}
    missing = [layer for layer in layers[int(first) :: int(stride)] if layer not in done]
    with Progress() as progress:
        task = progress.add_task("steps", total=len(missing) * steps)
        for layer in missing:
            started = time.process_time()
            losses = train_layer(
                shape,
                layer,
                paths[:-HELD_OUT],
                paths[-HELD_OUT:],
                folder,
                steps=steps,
                seed=seed,
                told=lambda _: progress.advance(task),
            )
            row = {"layer": layer} | losses | {"cpu_seconds": time.process_time() - started}
            with told.open("a") as file:
                file.write(json.dumps(row) + "\n")
    rows = [row for row in json_lines(told) if row["layer"] in layers]
    if len(rows) < len(layers):
        return  # other processes are at it
    report = {
        "name": folder.name,
        "shape": asdict(shape),
        "passages": [name for name, _ in found[:-HELD_OUT]],
        "tokens": tokens,
        "rows": ROWS,
        "steps": steps,
        "seed": seed,
        "layers": sorted(rows, key=lambda row: row["layer"]),
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
