"""Chooses the pages that queries read, by a selector's estimates: sinks, a window and the best others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from sgl_importance_kernels.sparse.upload import upload

MOST_PAGES = 4096
"""Pages of a context that one program of Triton's holds in its registers: 65,536 tokens in pages of 16."""


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """What holds for every choice, whatever the selector.

    Attributes:
        sink_tokens: first tokens of a context; their pages are always read.
        window_tokens: last tokens of a context, likewise.
    """

    sink_tokens: int
    window_tokens: int

    def num_sinks(self, page_size: int) -> int:
        """First pages that are always read."""
        return -(-self.sink_tokens // page_size)

    def num_forced(self, num_tokens: int, page_size: int) -> int:
        """Pages before a context's last that are read whatever the budget: sinks and window."""
        num_before = (num_tokens - 1) // page_size
        num_recent = num_before - min(max(num_tokens - self.window_tokens, 0) // page_size, num_before)
        return min(self.num_sinks(page_size) + num_recent, num_before)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a rule says of contexts whatever their estimates: alike in every layer of a step.

    Attributes:
        is_before: whether there is a page before the last, bool [rows, most pages].
        is_forced: whether it is read whatever the budget, bool [rows, most pages].
        count: pages before the last that may be read, [rows, 1].
    """

    is_before: torch.Tensor
    is_forced: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True)
class Contexts:
    """The contexts that queries choose among, one a row; all tensors are int64.

    The last page, which holds the newest token, is always read, and nothing need be known of it: it is being
    filled, or the step itself completes it.

    Attributes:
        pages: in order, [rows, most pages]; 0 behind the last.
        num_tokens: [rows].
        max_pages: the budget of each, [rows]; every row has more pages than that.
        most_chosen: largest number of pages before the last that a row may read.
        page_size: tokens per page.
        num_read: pages that a row reads, on the host; empty where nobody asks.

    What follows from these is computed once: every layer of a step asks for it.
    """

    pages: torch.Tensor
    num_tokens: torch.Tensor
    max_pages: torch.Tensor
    most_chosen: int
    page_size: int
    num_read: Sequence[int] = ()

    @classmethod
    def of(
        cls,
        pages: torch.Tensor,
        num_tokens: Sequence[int],
        max_pages: Sequence[int],
        rule: ChoiceRule,
        page_size: int,
    ) -> Contexts:
        """Contexts out of the rows' pages, [rows, most pages] and 0 behind the last, tokens and budgets."""
        rows = zip(num_tokens, max_pages, strict=True)
        chosen = [_num_chosen(rule, count, budget, page_size) for count, budget in rows]
        tokens, budgets = upload([num_tokens, max_pages], pages.device)
        return cls(
            pages=pages,
            num_tokens=tokens,
            max_pages=budgets,
            most_chosen=max(chosen),
            page_size=page_size,
            num_read=[pages + 1 for pages in chosen],
        )

    def __post_init__(self) -> None:
        _ = self.num_before  # before the first layer, for all of them

    @cached_property
    def num_before(self) -> torch.Tensor:
        """Pages before the last, [rows]."""
        return (self.num_tokens - 1) // self.page_size

    @cached_property
    def last_page(self) -> torch.Tensor:
        """The last page, [rows]."""
        return self.pages.gather(1, self.num_before[:, None])[:, 0]

    def limits(self, rule: ChoiceRule) -> Limits:
        """What ``rule`` says of them."""
        if rule not in self._limits:
            self._limits[rule] = self._limits_of(rule)
        return self._limits[rule]

    @cached_property
    def _limits(self) -> dict[ChoiceRule, Limits]:
        return {}

    def _limits_of(self, rule: ChoiceRule) -> Limits:
        size = self.page_size
        first_recent = (self.num_tokens[:, None] - rule.window_tokens).clamp(min=0) // size
        at = torch.arange(self.pages.shape[1], device=self.pages.device)
        is_before = at < self.num_before[:, None]
        is_forced = is_before & ((at < rule.num_sinks(size)) | (at >= first_recent))
        count = torch.maximum(self.max_pages[:, None] - 1, is_forced.sum(dim=1, keepdim=True))
        return Limits(is_before, is_forced, count)


def _num_chosen(rule: ChoiceRule, num_tokens: int, max_pages: int, page_size: int) -> int:
    """Pages before the last that the budget of a context allows; the last is part of it."""
    return min(max(max_pages - 1, rule.num_forced(num_tokens, page_size)), (num_tokens - 1) // page_size)


def choose_pages(
    logits: torch.Tensor,
    contexts: Contexts,
    rule: ChoiceRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages before the last that the queries of each row read. No shape depends on what a tensor holds.

    A page is as good as the largest share of a query's estimated attention that it has, over all queries of
    its row: heads are compared by shares, as the scales of their logits differ.

    Args:
        logits: estimates, float32 [rows, queries, most pages], -inf behind the pages before a row's last.
        contexts: of the rows.
        rule: what holds for every choice.

    Returns:
        Pages, int64 [rows, most chosen], in the order of the context and -1 behind the last, and the
        largest share of its estimated attention that a query finds in each, float32, 0 behind the last.
    """
    most_pages, limits = logits.shape[2], contexts.limits(rule)
    is_before, is_forced = (part[:, :most_pages] for part in (limits.is_before, limits.is_forced))

    log_shares = logits - logits.logsumexp(dim=2, keepdim=True)
    largest = log_shares.amax(dim=1)
    scores = largest.masked_fill(is_forced, math.inf).masked_fill(~is_before, -math.inf)
    values, indices = scores.topk(contexts.most_chosen, dim=1)

    rank = torch.arange(contexts.most_chosen, device=logits.device)
    is_chosen = (rank < limits.count) & (values > -math.inf)
    chosen = torch.where(is_chosen, indices, most_pages).sort(dim=1).values
    is_chosen = chosen < most_pages
    chosen = chosen.clamp(max=most_pages - 1)
    pages = torch.where(is_chosen, contexts.pages.gather(1, chosen), -1)
    return pages, torch.where(is_chosen, largest.gather(1, chosen).exp(), 0.0)
