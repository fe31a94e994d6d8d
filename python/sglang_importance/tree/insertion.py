"""The source of an insertion into the tree, handed down to the nodes that it makes."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_importance.nodes.named_sessions import Session
from sgl_importance.placement.hints.hinted_request import HintedRequest, LostPages
from sgl_importance.reuse.reuse_class import Transition


@dataclass(frozen=True, slots=True)
class Insertion:
    """One insertion of a request's tokens.

    Attributes:
        transition: of the request; None where no request asked for the tokens (a pre-warm), which is no
            evidence of reuse.
        rid: the request's id; None of a pre-warm, and where it is not known (storage).
        serial: of the request's query; None where it has none.
        hinted: the request's hints; None where it has none.
        is_from_storage: whether the storage tier had the tokens: then the request is yet to be admitted.
        session: of the request; None where it names none.
        lost: takes the pages that the request has to compute again; None where no report is wanted.
    """

    transition: Transition | None
    rid: str | None = None
    serial: int | None = None
    hinted: HintedRequest | None = None
    session: Session | None = None
    lost: list[LostPages] | None = None
    is_from_storage: bool = False

    @property
    def is_prewarm(self) -> bool:
        return self.transition is None
