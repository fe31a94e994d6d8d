"""Chooses the pages that the queries of one request read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from sgl_importance_kernels.pages.page_choice import ChoiceRule, Contexts, choose_pages
from sgl_importance_kernels.pages.representations import Representations
from sgl_importance_kernels.pages.traffic import PageTraffic


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
        rule, num_complete = self._rule, num_tokens // self._page_size
        complete, partial = pages[:num_complete], pages[num_complete:]
        logits = self._representations.selector.logits(
            queries.float().contiguous(), self._representations.of(layer, complete)
        )
        bonus = rule.bonus(self._is_resident(layer, complete))[None] if rule.resident_bias else None
        contexts = Contexts.of([pages], [num_tokens], [max_pages], rule, self._page_size)
        (chosen,), (shares,) = choose_pages(
            logits[None], contexts, rule, unit_pages=self._unit_pages, bonus=bonus
        )
        is_page = chosen >= 0
        # The partial page is being filled, in a frame: nothing is known of it, nor asked.
        read = torch.cat([chosen[is_page], partial])
        self._traffic.selected += len(read)
        return read, pad(shares[is_page], (0, len(partial)))
