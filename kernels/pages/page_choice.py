"""Chooses the pages that the queries of some tokens read, by a selector's estimates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from sgl_importance_kernels.pages.representations import Representations
from sgl_importance_kernels.pages.traffic import PageTraffic


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """What holds for every choice, whatever the selector.

    Attributes:
        sink_tokens: first tokens of a context; their pages are always read.
        window_tokens: last tokens of a context, likewise.
        top_p: the best pages are read until each query finds this share of its estimated attention; 1 for
            as many as the budget allows (Twilight, Lin et al., 2025).
        least_share: pages are left out where no query expects a key whose weight is this share of its
            largest; 0 for none (BLASST, 2025).
        resident_bias: a resident page's share counts (1 + this)-fold; above 0, answers depend on what is
            resident.
    """

    sink_tokens: int
    window_tokens: int
    top_p: float = 1.0
    least_share: float = 0.0
    resident_bias: float = 0.0

    def num_sinks(self, page_size: int) -> int:
        """First pages that are always read."""
        return -(-self.sink_tokens // page_size)

    def num_recent(self, num_tokens: int, page_size: int) -> int:
        """Last complete pages of a context that are always read."""
        return num_tokens // page_size - max(num_tokens - self.window_tokens, 0) // page_size


class PageChooser:
    """Maps what a selector estimates to pages: the best ones, with sinks and a local window.

    Args:
        representations: with the selector.
        page_size: tokens per page.
        rule: what holds for every choice.
        traffic: counts what is chosen.
        is_resident: whether pages of a layer are on the device; what ``rule.resident_bias`` rests on.
    """

    def __init__(
        self,
        representations: Representations,
        page_size: int,
        rule: ChoiceRule,
        traffic: PageTraffic,
        is_resident: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> None:
        self._representations = representations
        self._is_resident = is_resident
        self._page_size = page_size
        self._rule = rule
        self._traffic = traffic
        self._unit_pages = max(1, representations.selector.unit_tokens // page_size)

    def choose(
        self, layer: int, queries: torch.Tensor, pages: torch.Tensor, num_tokens: int, max_pages: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The pages that queries read, all of them the same.

        Args:
            layer: index among the pool's layers.
            queries: scaled as attention scales them, [tokens, heads, head dimension].
            pages: of the context, in order; int64 [pages].
            num_tokens: of the context; only the last page may be partial. It is always read.
            max_pages: the budget. Sinks and window are part of it, and are read even where it is less.

        Returns:
            Pages in the order of the context, int64, and the largest share of its estimated attention that a
            query finds in each, float32; no shares where all pages are read.
        """
        self._traffic.candidates += len(pages)
        if max_pages >= len(pages):
            self._traffic.selected += len(pages)
            return pages, None
        size = self._page_size
        num_complete = num_tokens // size
        num_partial = len(pages) - num_complete
        logits = self._representations.selector.logits(
            queries.float().contiguous(), self._representations.of(layer, pages[:num_complete])
        )
        bonus = None
        if self._rule.resident_bias:
            resident = self._is_resident(layer, pages[:num_complete])
            bonus = math.log1p(self._rule.resident_bias) * resident.float()
        kept, shares = best_pages(
            logits,
            bonus=bonus,
            max_pages=max_pages - num_partial,
            num_sinks=self._rule.num_sinks(size),
            num_recent=self._rule.num_recent(num_tokens, size),
            unit_pages=self._unit_pages,
            top_p=self._rule.top_p,
            least_share=self._rule.least_share,
        )
        self._traffic.selected += len(kept) + num_partial
        # The partial page is being filled, in a frame: nothing is known of it, nor asked.
        return torch.cat([pages[kept], pages[num_complete:]]), pad(shares, (0, num_partial))


def best_pages(
    logits: torch.Tensor,
    *,
    max_pages: int,
    num_sinks: int,
    num_recent: int,
    unit_pages: int = 1,
    top_p: float = 1.0,
    least_share: float = 0.0,
    bonus: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the pages to read, ascending, int64, and the largest share that a query has there, float32.

    A page is as good as the largest share of a query's estimated attention that it has, over all queries:
    heads are compared by shares, as the scales of their logits differ.

    Args:
        logits: estimates, float32 [queries, pages].
        max_pages: how many; the first and last ones are among them, and are taken even where it is less.
        num_sinks: first pages that are always taken.
        num_recent: last pages that are always taken.
        unit_pages: pages that are taken or left together.
        top_p: as in ``ChoiceRule``.
        least_share: as in ``ChoiceRule``.
        bonus: what is added to the logarithm of a page's share, float32 [pages]; None for nothing.
    """
    num_pages = logits.shape[1]
    log_shares = logits - logits.logsumexp(dim=1, keepdim=True)
    largest = log_shares.amax(dim=0)
    scores = largest.clone() if bonus is None else largest + bonus
    num_forced = min(num_sinks + num_recent, num_pages)
    if unit_pages > 1:
        scores = _by_unit(scores, unit_pages)
    scores[:num_sinks] = math.inf
    scores[max(num_pages - num_recent, 0) :] = math.inf
    best = scores.topk(min(max(max_pages, num_forced), num_pages)).indices
    if top_p < 1:
        covered = log_shares[:, best].exp().cumsum(dim=1).amin(dim=0)
        best = best[: max(int((covered < top_p).sum()) + 1, num_forced)]
    if least_share > 0:
        weights = logits[:, best] - logits.amax(dim=1, keepdim=True)
        matters = (weights >= math.log(least_share)).any(dim=0)
        best = best[matters | scores[best].isinf()]
    best = best.sort().values
    return best, largest[best].exp()


def _by_unit(scores: torch.Tensor, unit_pages: int) -> torch.Tensor:
    """The best score within each unit, for every page of it. Pages of a unit stay together in the order."""
    num_pages = len(scores)
    padding = -num_pages % unit_pages
    units = pad(scores, (0, padding), value=-math.inf).view(-1, unit_pages)
    return units.amax(dim=1, keepdim=True).expand_as(units).flatten()[:num_pages].clone()
