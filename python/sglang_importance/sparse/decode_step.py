"""The single tokens of a forward pass that are computed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from sgl_importance_kernels.sparse.page_choice import Contexts
from sgl_importance_kernels.sparse.page_chooser import PageChooser
from sglang_importance.sparse.span import Span

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
        chosen: how many pages they have chosen so far, over layers, [spans].
    """

    spans: Sequence[Span]
    rows: torch.Tensor
    everything: torch.Tensor
    last_tokens: torch.Tensor
    contexts: Contexts | None
    chosen: torch.Tensor

    @classmethod
    def of(cls, spans: Sequence[Span], page_size: int, chooser: PageChooser | None) -> DecodeStep:
        """The step of spans, all of which have a context.

        Args:
            chooser: chooses among more pages than they may read; None where they read everything.
        """
        device = spans[0].pages.device
        contexts = [span.context for span in spans]
        return cls(
            spans,
            rows=torch.tensor([span.rows.start for span in spans], device=device),
            everything=pad_sequence(
                [span.pages.roll(1) for span in spans], batch_first=True, padding_value=-1
            ),
            last_tokens=torch.tensor([(tokens - 1) % page_size + 1 for tokens in contexts], device=device),
            contexts=None
            if chooser is None
            else chooser.contexts(
                [span.pages for span in spans],
                contexts,
                [span.choice.max_pages for span in spans if span.choice is not None],
            ),
            chosen=torch.zeros(len(spans), dtype=torch.int64, device=device),
        )
