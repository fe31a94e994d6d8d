"""Pages as an indexer estimates them, and as exact attention of all heads together would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from benchmark.native_scores.indexer import Indexer, in_fp8
from benchmark.native_scores.seen import Seen
from benchmark.native_scores.teacher import WatchedDecoder
from benchmark.sparse.real.choosing import Estimates, Estimator
from benchmark.sparse.real.windows import Task

Of_page = Literal["max", "sum"]


def page_estimates(scores: torch.Tensor, page_size: int, of_page: Of_page) -> torch.Tensor:
    """Logits of pages [..., pages] out of those of tokens [..., tokens]."""
    by_page = scores.unflatten(-1, (-1, page_size))
    return by_page.amax(dim=-1) if of_page == "max" else by_page.logsumexp(dim=-1)


def of_indexer(
    indexers: Mapping[int, Indexer],
    decoder: WatchedDecoder,
    seen: Seen,
    tasks: Sequence[Task],
    cue_inputs: Sequence[torch.Tensor],
    of_page: Of_page,
) -> Estimator:
    """What the layers' indexers choose by; ``chosen_answers`` asks for each task once, in their order.

    Args:
        indexers: of the layers that choose.
        decoder: computes the pass that asks, so that its inputs are the queries'.
        seen: the window.
        tasks: behind it.
        cue_inputs: what the layers were fed for all tokens of the tasks when these were computed exactly,
            [tokens, width] for each layer.
        of_page: how the tokens of a page make its estimate.
    """
    size = seen.keys.shape[1]
    window = torch.arange(size)
    exact_sizes = [len(task.cue) + len(task.scored) - 1 for task in tasks]
    sizes = [len(task.scored) for task in tasks]

    def prepare(layer: int, keys: torch.Tensor) -> Estimates:
        indexer, page_size = indexers[layer], keys.shape[1]
        cues, new = cue_inputs[layer].split(exact_sizes), decoder.inputs[layer].split(sizes)
        window_keys = in_fp8(indexer.keys_of(seen.inputs[layer].float(), window))
        asked = iter(zip(tasks, cues, new, strict=True))

        def estimates(queries: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
            task, cue, inputs = next(asked)
            before = len(task.cue) - 1
            own = torch.cat([cue[:before], inputs])
            own_keys = in_fp8(indexer.keys_of(own, torch.arange(size, size + len(own))))
            scored = torch.cat([window_keys, own_keys])[: len(pages) * page_size]
            positions = torch.arange(size + before, size + len(own))
            logits = page_estimates(indexer.scores(inputs, positions, scored), page_size, of_page)
            return logits.repeat_interleave(queries.shape[1], dim=0)

        return estimates

    return prepare


def shared(of_page: Of_page) -> Estimator:
    """The attention of all heads together, read from every key: what an indexer is trained towards."""

    def prepare(layer: int, keys: torch.Tensor) -> Estimates:
        kv_heads = keys.shape[2]

        def estimates(queries: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
            count, heads, dim = queries.shape
            known = keys[pages].flatten(0, 1)
            logits = torch.einsum("tkgd,skd->tkgs", queries.view(count, kv_heads, -1, dim), known)
            summed = logits.flatten(1, 2).log_softmax(dim=2).logsumexp(dim=1)
            return page_estimates(summed, keys.shape[1], of_page).repeat_interleave(heads, dim=0)

        return estimates

    return prepare
