"""H4: how much of what the next queries read lies where a producer's scores would have placed it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch

from benchmark.native_scores.indexer import Indexer
from benchmark.native_scores.producers import Observed
from benchmark.native_scores.seen import Seen

OBSERVED = 32
"""Queries that are observed before pages are placed, and queries that then read: as the server's window."""
STEP = 2 * OBSERVED
WANTED, PLACED = 0.1, 0.2
"""Shares of the candidates: what a query reads, and what the fast memory holds."""

Key = tuple[str, str, str]
"""Producer, grain (``layer`` or ``model``), and by what the queries choose (``exact`` or ``native``)."""


def top(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Which are the largest along the last dimension, bool of the same shape; at least one."""
    count = max(1, round(share * scores.shape[-1]))
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(count).indices, True)


def cuts(tokens: int) -> range:
    """Positions between what is observed and what is wanted, in the second half of a text."""
    return range(tokens // 2, tokens - OBSERVED + 1, STEP)


def candidates_at(cut: int, page_size: int) -> slice:
    """Pages that every query around a cut may leave out: no sinks, and none that is near to one of them."""
    return slice(1, (cut - 2 * OBSERVED) // page_size)


def hits(
    seen: Seen, indexers: Mapping[int, Indexer], *, page_size: int, seed: int
) -> dict[Key, tuple[int, int]]:
    """Pages that were wanted and placed, and all that were wanted, summed over cuts, queries and layers.

    Args:
        seen: a window.
        indexers: of the layers that are looked at.
        page_size: tokens per page.
        seed: of the shuffled control.
    """
    counted: dict[Key, list[int]] = defaultdict(lambda: [0, 0])
    for cut in cuts(seen.keys.shape[1]):
        scores, wanted = _of_cut(seen, indexers, cut, page_size, seed)
        for producer, by_layer in scores.items():
            for grain, ranked in _grains(by_layer):
                placed = top(ranked, PLACED)
                for judge, asked in wanted.items():
                    count = counted[producer, grain, judge]
                    count[0] += int((asked & placed[:, None]).sum())
                    count[1] += int(asked.sum())
    return {key: (found, requests) for key, (found, requests) in counted.items()}


def _grains(by_layer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "layer", by_layer
    yield "model", by_layer.mean(dim=0, keepdim=True).expand_as(by_layer)


def _of_cut(
    seen: Seen, indexers: Mapping[int, Indexer], cut: int, page_size: int, seed: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Scores [layers, candidates] by producer, and what is wanted, bool [layers, queries, candidates]."""
    scores: dict[str, list[torch.Tensor]] = defaultdict(list)
    wanted: dict[str, list[torch.Tensor]] = defaultdict(list)
    draws = torch.Generator().manual_seed(seed + cut)
    candidates = candidates_at(cut, page_size)
    before, after = torch.arange(cut - OBSERVED, cut), torch.arange(cut, cut + OBSERVED)
    for layer, indexer in indexers.items():
        observed, future = (
            Observed(
                seen.queries[layer, rows].float(),
                seen.keys[layer, : cut + OBSERVED],
                rows,
                page_size=page_size,
                candidates=candidates,
            )
            for rows in (before, after)
        )
        mass = observed.mass()
        scores["mass"].append(mass)
        scores["peak"].append(observed.peak())
        scores["quest"].append(observed.quest())
        scores["blasst"].append(observed.blasst())
        scores["shuffled"].append(mass[torch.randperm(len(mass), generator=draws)])
        scores["uniform"].append(torch.rand(len(mass), generator=draws))
        scores["newest"].append(torch.arange(len(mass)).float())
        scores["future"].append(future.mass())
        # As the choice of pages goes: a page is as good as the largest share that a head gives it.
        wanted["exact"].append(top(future.shares.amax(dim=0), WANTED))
        inputs = seen.inputs[layer, : cut + OBSERVED].float()
        scores["native"].append(observed.native(indexer, inputs).mean(dim=0))
        wanted["native"].append(top(future.native(indexer, inputs), WANTED))
    return (
        {name: torch.stack(parts) for name, parts in scores.items()},
        {name: torch.stack(parts) for name, parts in wanted.items()},
    )
