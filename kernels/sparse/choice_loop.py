"""The pages that queries read, row by row: ``choose_pages``, compiled for CPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sgl_importance_kernels.jit import njit
from sgl_importance_kernels.sparse.page_choice import ChoiceRule, Contexts

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "nsz", "contract"}}

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@njit(
    "void(float32[:,:,::1], int64[:,::1], boolean[:,::1], boolean[:,::1], int64[:,::1], int64[:,::1],"
    " float32[:,::1])",
    **_OPTIONS,
)
def _choose_rows(
    logits: Floats,
    pages: Numbers,
    is_before: Flags,
    is_forced: Flags,
    count: Numbers,
    chosen: Numbers,
    shares: Floats,
) -> None:
    """As ``choose_pages``, row by row; of pages that are as good the first are chosen.

    Args:
        logits: [rows, queries, most pages].
        pages: [rows, at least as many].
        is_before: whether there is a page before the last, likewise.
        is_forced: whether it is read whatever the budget, likewise.
        count: pages before the last that may be read, [rows, 1].
        chosen: results, [rows, most chosen].
        shares: results, likewise.
    """
    num_pages = logits.shape[2]
    largest = np.empty(num_pages, np.float32)
    scores = np.empty(num_pages, np.float32)
    for row in range(len(logits)):
        largest[:] = -np.inf
        for query in range(logits.shape[1]):
            of_query = logits[row, query]
            top = of_query.max()
            total = np.float32(0.0)
            for page in range(num_pages):
                total += np.exp(of_query[page] - top)
            log_sum = top + np.log(total)
            for page in range(num_pages):
                largest[page] = max(largest[page], of_query[page] - log_sum)
        num_before = 0
        for page in range(num_pages):
            scores[page] = np.inf  # behind all others: they are sorted upwards
            if is_before[row, page]:
                num_before += 1
                scores[page] = -largest[page]
                if is_forced[row, page]:
                    scores[page] = -np.inf
        num_chosen = min(count[row, 0], num_before, chosen.shape[1])
        best = np.sort(np.argsort(scores, kind="mergesort")[:num_chosen])
        chosen[row] = -1
        shares[row] = 0
        for at in range(num_chosen):
            chosen[row, at] = pages[row, best[at]]
            shares[row, at] = np.exp(largest[best[at]])


def choose_pages(
    logits: torch.Tensor,
    contexts: Contexts,
    rule: ChoiceRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``page_choice.choose_pages``, arguments and results, on a CPU."""
    limits, rows = contexts.limits(rule), len(logits)
    chosen = torch.empty(rows, contexts.most_chosen, dtype=torch.int64)
    shares = torch.empty(rows, contexts.most_chosen)
    _choose_rows(
        logits.numpy(),
        contexts.pages.numpy(),
        limits.is_before.numpy(),
        limits.is_forced.numpy(),
        limits.count.numpy(),
        chosen.numpy(),
        shares.numpy(),
    )
    return chosen, shares
