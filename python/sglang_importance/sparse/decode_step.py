"""The single tokens of a forward pass that are computed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sgl_importance.sparse.selection_rule import Selection
from sgl_importance_kernels.sparse.page_choice import MOST_PAGES, Contexts
from sgl_importance_kernels.sparse.page_chooser import PageChooser
from sgl_importance_kernels.sparse.upload import upload


@dataclass(frozen=True, slots=True)
class Choice:
    """How tokens of a request choose among the pages of their context.

    Attributes:
        selection: of the request.
        max_pages: how many pages may be read.
    """

    selection: Selection
    max_pages: int


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of a request in a forward pass that read the same pages.

    Attributes:
        rows: their rows in the batch's tensors.
        request: their request's place in the batch.
        context: tokens in the pool that they attend to through pages.
        pages: those tokens' pages, in order; int64 [pages].
        is_causal: whether they attend to each other beside, as they are; else the context has them.
        choice: which of the pages they read; None for all.
    """

    rows: slice
    request: int
    context: int
    pages: torch.Tensor
    is_causal: bool
    choice: Choice | None


STEP_PAGES = 2**19
"""Most pages of a step's contexts, padding included: a selector's estimates take four bytes a page and head.
Decode seldom has as many, but a retracted answer comes back as thousands of tokens in one pass."""


def parts(spans: Sequence[Span]) -> Iterator[Sequence[Span]]:
    """Spans in their order, as many at a time as ``STEP_PAGES`` allows, and at least one."""
    start, most = 0, 0
    for at, span in enumerate(spans):
        most = max(most, len(span.pages))
        if at > start and (at + 1 - start) * most > STEP_PAGES:
            yield spans[start:at]
            start, most = at, len(span.pages)
    if start < len(spans):
        yield spans[start:]


def choosing_parts(spans: Sequence[Span]) -> Iterator[Sequence[Span]]:
    """As ``parts``, with contexts apart that no kernel holds: what chooses among them rounds otherwise."""
    for is_held in (True, False):
        yield from parts([span for span in spans if (len(span.pages) <= MOST_PAGES) == is_held])


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Tokens that attend to pages alone, each a row; all tensors are int64.

    Attributes:
        spans: of these tokens.
        rows: theirs in the batch's tensors, [spans].
        everything: all pages of their contexts, [spans, most pages]; the last page, which alone may be
            partial, comes first, and -1 behind the others.
        last_tokens: tokens of the last page, [spans].
        contexts: what they choose from; None where they read everything in every layer.
    """

    spans: Sequence[Span]
    rows: torch.Tensor
    everything: torch.Tensor
    last_tokens: torch.Tensor
    contexts: Contexts | None

    @classmethod
    def of(
        cls, spans: Sequence[Span], table: torch.Tensor, page_size: int, chooser: PageChooser | None
    ) -> DecodeStep:
        """The step of spans, all of which have a context. Nothing waits for the device.

        Args:
            table: pages of each request of the batch in order, int64 [requests, most pages]; anything behind.
            page_size: tokens per page.
            chooser: chooses among more pages than they may read; None where they read everything.
        """
        contexts, counts = [span.context for span in spans], [len(span.pages) for span in spans]
        rows, requests, num_pages, last_tokens = upload(
            [
                [span.rows.start for span in spans],
                [span.request for span in spans],
                counts,
                [(tokens - 1) % page_size + 1 for tokens in contexts],
            ],
            table.device,
        )
        at, count = torch.arange(max(counts), device=table.device), num_pages[:, None]
        pages, is_page = table[requests, : len(at)], at < count
        return cls(
            spans,
            rows=rows,
            everything=torch.where(is_page, pages.gather(1, (at - 1) % count), -1),
            last_tokens=last_tokens,
            contexts=None
            if chooser is None
            else chooser.contexts(
                torch.where(is_page, pages, 0),
                contexts,
                [span.choice.max_pages for span in spans if span.choice is not None],
            ),
        )
