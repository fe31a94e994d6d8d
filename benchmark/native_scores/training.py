"""Trains the indexer of one layer on its lessons."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmark.native_scores.indexer import Indexer, IndexerShape
from benchmark.native_scores.teacher import is_choosable, read_lesson

ROWS = 64
"""Queries of a step, all of one text."""
RATE, WARM_UP = 2e-3, 0.05
TINY = torch.finfo(torch.float16).tiny

Lesson = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Inputs [tokens, width], attention [rows, tokens], the rows' positions [rows]."""


def divergence(indexer: Indexer, lesson: Lesson) -> torch.Tensor:
    """Kullback-Leibler divergence of the indexer's softmax from attention, nats, a mean over rows: both over
    the tokens that may be left out, which is what the indexer is asked about."""
    inputs, attention, rows = (part.float() if part.is_floating_point() else part for part in lesson)
    keys = indexer.keys_of(inputs, torch.arange(len(inputs)))
    scores = indexer.scores(inputs[rows], rows, keys)
    scores = scores.masked_fill(~is_choosable(rows, len(inputs)), float("-inf"))
    known = attention / attention.sum(dim=1, keepdim=True).clamp(min=TINY)
    logs = scores.log_softmax(dim=1).masked_fill(known == 0, 0.0)
    return (torch.special.xlogy(known, known) - known * logs).sum(dim=1).mean()


def train(
    shape: IndexerShape,
    lessons: Sequence[Lesson],
    *,
    steps: int,
    seed: int,
    told: Callable[[float], None] = lambda loss: None,
) -> Indexer:
    """An indexer after so many steps of AdamW, each on some rows of one lesson.

    Args:
        shape: of the indexer.
        lessons: of one layer.
        steps: to take.
        seed: of the first weights and of all draws.
        told: hears the loss of every step.
    """
    torch.manual_seed(seed)
    draws = torch.Generator().manual_seed(seed)
    with torch.enable_grad():
        indexer = Indexer(shape)
        optimizer = torch.optim.AdamW(indexer.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at((step + 1) / steps))
        for _ in range(steps):
            inputs, attention, rows = lessons[int(torch.randint(len(lessons), (), generator=draws))]
            some = torch.randperm(len(rows), generator=draws)[:ROWS]
            loss = divergence(indexer, (inputs, attention[some], rows[some]))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(indexer.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            told(loss.item())
    return indexer.requires_grad_(False)


def rate_at(progress: float) -> float:
    """Share of the full learning rate: a short rise, then half a cosine."""
    return min(progress / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * progress))


def train_layer(
    shape: IndexerShape,
    layer: int,
    paths: Sequence[Path],
    held_out: Sequence[Path],
    folder: Path,
    *,
    steps: int,
    seed: int,
    told: Callable[[float], None] = lambda loss: None,
) -> dict[str, float]:
    """Trains and writes one layer's indexer into ``folder``.

    Returns:
        Divergences on lessons that nothing was learned from, before and after training.
    """
    lessons = [read_lesson(path, layer) for path in paths]
    tried = [read_lesson(path, layer) for path in held_out]
    indexer = train(shape, lessons, steps=steps, seed=seed + layer, told=told)
    with torch.no_grad():
        losses = [divergence(indexer, lesson).item() for lesson in tried]
        torch.manual_seed(seed + layer)
        fresh = Indexer(shape)
        before = [divergence(fresh, lesson).item() for lesson in tried]
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{layer}.part"
    save_file(indexer.state_dict(), unfinished)
    unfinished.replace(folder / f"layer-{layer}.safetensors")
    return {"before": sum(before) / len(before), "after": sum(losses) / len(losses)}


@dataclass(frozen=True)
class Trained:
    """The indexers of some layers of a model, and what their training says of itself."""

    shape: IndexerShape
    indexers: dict[int, Indexer]
    report: dict[str, Any]


def load_indexers(cache: Path, arms: Sequence[str]) -> dict[str, Trained]:
    """The trained indexers among ``arms`` by name, ``dimN`` for those of N dimensions.

    Raises:
        FileNotFoundError: they have not been trained.
    """
    found = {}
    for name in dict.fromkeys(arm.partition("/")[0] for arm in arms if arm.startswith("dim")):
        folder = cache / name
        report = folder / "report.json"
        if not report.exists():
            raise FileNotFoundError(f"no indexers in {folder}: run train.py with --dim {name[3:]}")
        told = json.loads(report.read_text())
        shape = IndexerShape(**told["shape"])
        layers = [row["layer"] for row in told["layers"]]
        indexers = {layer: load_indexer(shape, layer, folder) for layer in layers}
        found[name] = Trained(shape, indexers, told)
    return found


def load_indexer(shape: IndexerShape, layer: int, folder: Path) -> Indexer:
    """One layer's indexer."""
    indexer = Indexer(shape)
    indexer.load_state_dict(load_file(folder / f"layer-{layer}.safetensors"))
    return indexer.requires_grad_(False)
