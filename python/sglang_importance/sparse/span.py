"""Which tokens of a forward pass read which pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_importance.sparse.selection_rule import Selection


@dataclass(frozen=True, slots=True)
class Choice:
    """How tokens of a request choose among the pages of their context.

    Attributes:
        selection: of the request.
        position: of the first of them.
        max_pages: how many pages may be read.
        audited_layer: whose choice is compared with exact attention; None for none.
    """

    selection: Selection
    position: int
    max_pages: int
    audited_layer: int | None


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
