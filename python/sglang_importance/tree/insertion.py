"""Who brings tokens into the tree: handed down to the nodes that they make."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_importance.hints.hinted_request import HintedRequest, LostPages
from sgl_importance.reuse.reuse_class import Transition


@dataclass(frozen=True, slots=True)
class Insertion:
    """One insertion of a request's tokens.

    Attributes:
        transition: how the request relates to what was known; None where nobody asked for the tokens (a
            pre-warm), which says nothing about their reuse.
        rid: the request's id; None of a pre-warm, and where it is not known (storage).
        serial: of the request's query; None where it has none.
        hinted: what the request said of itself; None where it said nothing.
        lost: takes what the request has to compute again; None where nobody asks.
    """

    transition: Transition | None
    rid: str | None = None
    serial: int | None = None
    hinted: HintedRequest | None = None
    lost: list[LostPages] | None = None

    @property
    def is_prewarm(self) -> bool:
        return self.transition is None
