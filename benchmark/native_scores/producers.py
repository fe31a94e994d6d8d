"""Producers of the signal: what each says of the pages of a context after some queries."""

from __future__ import annotations

import torch

from benchmark.native_scores.indexer import Indexer, in_fp8
from benchmark.native_scores.teacher import head_weights


class Observed:
    """Consecutive queries of one layer over the pages of their past.

    Args:
        queries: [rows, heads, dimension], unscaled.
        keys: of whole pages, [tokens, KV heads, dimension].
        rows: positions of the queries, int64 [rows].
        page_size: tokens per page.
        candidates: pages that may be placed, a slice.
    """

    def __init__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        rows: torch.Tensor,
        *,
        page_size: int,
        candidates: slice,
    ) -> None:
        self._queries, self._keys, self._candidates = queries, keys, candidates
        self._page_size = page_size
        weights = head_weights(queries, keys, rows)
        self._by_page = weights.unflatten(2, (-1, page_size))
        self._rows = rows

    @property
    def shares(self) -> torch.Tensor:
        """Attention on each candidate, [heads, rows, candidates]."""
        return self._by_page.sum(dim=3)[:, :, self._candidates]

    def mass(self) -> torch.Tensor:
        """Post hoc: attention on a page, a mean over heads and queries. All of these: [candidates]."""
        return self.shares.mean(dim=(0, 1))

    def peak(self) -> torch.Tensor:
        """Post hoc: the most that any head of any query gave to a page."""
        return self.shares.amax(dim=(0, 1))

    def quest(self) -> torch.Tensor:
        """Share of the exponentials of Quest's bounds (Tang et al., 2024), a mean over heads and queries."""
        pages = self._keys.unflatten(0, (-1, self._page_size))[self._candidates]
        rows, _, dim = self._queries.shape
        queries = self._queries.view(rows, pages.shape[2], -1, dim) * dim**-0.5
        upper = torch.einsum("rkgd,pkd->rkgp", queries.clamp(min=0), pages.amax(dim=1))
        lower = torch.einsum("rkgd,pkd->rkgp", queries.clamp(max=0), pages.amin(dim=1))
        return (upper + lower).softmax(dim=3).mean(dim=(0, 1, 2))

    def blasst(self) -> torch.Tensor:
        """Exponential of a page's largest logit minus the largest so far, in the order of the text
        (BLASST, 2025), a mean over heads and queries."""
        largest = self._by_page.amax(dim=3).log()
        return (largest - largest.cummax(dim=2).values).exp()[:, :, self._candidates].mean(dim=(0, 1))

    def native(self, indexer: Indexer, inputs: torch.Tensor) -> torch.Tensor:
        """Share of each candidate in the indexer's softmax over all, [rows, candidates].

        Args:
            indexer: of the layer.
            inputs: of the layer, at all tokens whose keys there are, [tokens, width].
        """
        first, last = (at * self._page_size for at in (self._candidates.start, self._candidates.stop))
        keys = in_fp8(indexer.keys_of(inputs[first:last], torch.arange(first, last)))
        weights = indexer.scores(inputs[self._rows], self._rows, keys).softmax(dim=1)
        return weights.unflatten(1, (-1, self._page_size)).sum(dim=2)
