"""Which tokens of a request read chosen pages only, and how many pages that may be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SINK_TOKENS = 16
"""First tokens of a context, which every query reads: attention rests on them (StreamingLLM, Xiao et al.)."""

WINDOW_TOKENS = 32
"""Last tokens of a context, which every query reads."""

NEVER = sys.maxsize


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens of a request that read the same pages.

    Attributes:
        start: position of the first.
        stop: position behind the last.
        selects: whether a selector chooses the pages; else all are read.
        is_generated: whether it is one token of an answer, which is computed as a decode step does.
    """

    start: int
    stop: int
    selects: bool
    is_generated: bool = False


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """Of one request. It depends on positions only, so that a prompt is read alike, cached or not.

    Attributes:
        prompt_tokens: length of the prompt.
        first: position of the first token that selects; ``NEVER`` where none does.
        budget: tokens that a query may read; below 1, their share of its context.
        page_size: tokens per page.
    """

    prompt_tokens: int
    first: int
    budget: float
    page_size: int

    def spans(self, start: int, stop: int) -> Iterator[TokenSpan]:
        """Divides the tokens from ``start`` to ``stop``.

        Tokens of a prompt that select do so together with those of their page, generated ones alone.
        """
        if start < self.first:
            yield TokenSpan(start, min(stop, self.first), selects=False)
        at = max(start, self.first)
        while at < stop:
            is_generated = at >= self.prompt_tokens
            page_end = at - at % self.page_size + self.page_size
            end = at + 1 if is_generated else min(page_end, self.prompt_tokens, stop)
            yield TokenSpan(at, end, selects=True, is_generated=is_generated)
            at = end

    def max_pages(self, context_tokens: int) -> int:
        """Pages that a query over a context may read."""
        tokens = self.budget * context_tokens if self.budget < 1 else self.budget
        return int(-(-tokens // self.page_size))


def selection_rule(
    *,
    prompt_tokens: int,
    selecting_prompt_tokens: int,
    min_context_tokens: int,
    budget: float,
    page_size: int,
) -> SelectionRule:
    """The rule of a request.

    Args:
        prompt_tokens: length of the prompt.
        selecting_prompt_tokens: last tokens of the prompt that select, with those of their first page before
            them; generated ones always do.
        min_context_tokens: a token with fewer before it reads all of them.
        budget: as in ``SelectionRule``.
        page_size: tokens per page.
    """
    first = prompt_tokens - selecting_prompt_tokens
    if selecting_prompt_tokens:
        # A hit ends with a page: tokens between it and the first that selects would read the whole context.
        first -= first % page_size
    first = max(first, min_context_tokens)
    return SelectionRule(prompt_tokens, first, budget, page_size)


def read_all(page_size: int) -> SelectionRule:
    """The rule of a request whose tokens read every page."""
    return SelectionRule(0, NEVER, 1.0, page_size)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Selection:
    """Of one request.

    Attributes:
        rule: which tokens select, and how many pages.
        candidates: pages that its tokens chose from, in all layers.
        selected: those that were chosen.
    """

    rule: SelectionRule
    candidates: int = 0
    selected: int = 0

    def report(self) -> dict[str, Any]:
        """The part ``pages`` of the report that a request may ask for."""
        return {"candidates": self.candidates, "selected": self.selected}
