"""Chooses the pages that the queries of one request read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from sgl_importance_kernels.sparse import choice_loop, page_choice
from sgl_importance_kernels.sparse.page_choice import ChoiceRule, Contexts
from sgl_importance_kernels.sparse.representations import Representations
from sgl_importance_kernels.sparse.traffic import PageTraffic


class PageChooser:
    """Maps what a selector estimates to pages: the best ones, with sinks and a local window.

    Args:
        representations: with the selector.
        page_size: tokens per page.
        rule: what holds for every choice.
        traffic: counts what is chosen.
    """

    def __init__(
        self,
        representations: Representations,
        page_size: int,
        rule: ChoiceRule,
        traffic: PageTraffic,
    ) -> None:
        self._representations = representations
        self._page_size = page_size
        self.rule = rule
        self._traffic = traffic

    @property
    def can_capture(self) -> bool:
        """Whether ``choose_step`` can be captured in a CUDA graph, as long as a kernel holds the contexts."""
        return self._representations.can_scan

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
        before, last = pages[:-1], pages[-1:]
        logits = self._representations.selector.logits(
            queries.float().contiguous(), self._representations.of(layer, before)
        )
        contexts = self.contexts(pages[None], [num_tokens], [max_pages])
        (chosen,), (shares,) = self._choose(logits[None], contexts)
        is_page = chosen >= 0
        read = torch.cat([chosen[is_page], last])
        self._traffic.selected += len(read)
        return read, pad(shares[is_page], (0, 1))

    def contexts(self, pages: torch.Tensor, num_tokens: Sequence[int], max_pages: Sequence[int]) -> Contexts:
        """Contexts out of rows' pages, int64 [rows, most pages] and 0 behind a row's last, their tokens and
        their budgets of fewer pages."""
        return Contexts.of(pages, num_tokens, max_pages, self.rule, self._page_size)

    def choose_step(
        self, layer: int, queries: torch.Tensor, rows: torch.Tensor, scale: float, contexts: Contexts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages that each of many requests reads with one token; counts nothing.

        What is kept of their pages must be built (``Representations.ensure``). Under Triton nothing waits for
        the device where the selector goes by a ``product``; it is two launches.

        Args:
            layer: index among the pool's layers.
            queries: of all tokens of the pass, [tokens, heads, head dimension].
            rows: which of them the contexts are of, int64 [rows].
            scale: as attention scales queries.
            contexts: of the rows.

        Returns:
            Pages, int64 [rows, 1 + most chosen]: the context's last, then those before it in their order, -1
            behind them. And the largest share of its estimated attention
            that a query finds in each, float32; 0 where there is none.
        """
        pages, num_pages = contexts.pages, contexts.num_before
        if self._representations.can_scan:
            from sgl_importance_kernels.sparse.triton import choice_kernel  # a CPU needs no Triton

            found = self._representations.scan(layer, queries.contiguous(), rows, scale, pages, num_pages)
            if choice_kernel.can_choose(contexts):
                return choice_kernel.choose(found, contexts, self.rule)
            logits = found.logits
        else:
            of_rows = (queries[rows] * scale).float().contiguous()
            logits = self._representations.step_logits(layer, of_rows, pages, num_pages)
        chosen, shares = self._choose(logits, contexts)
        return torch.cat([contexts.last_page[:, None], chosen], dim=1), pad(shares, (1, 0))

    def _choose(self, logits: torch.Tensor, contexts: Contexts) -> tuple[torch.Tensor, torch.Tensor]:
        choose_pages = (
            page_choice.choose_pages if self._representations.uses_triton else choice_loop.choose_pages
        )
        return choose_pages(logits, contexts, self.rule)
