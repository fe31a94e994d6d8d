"""Volatile beginnings in the answers of a scheduler, with text in the place of token ids."""

from __future__ import annotations

from typing import Any

from sgl_importance.observe.volatile.wording import CURE, sentence
from sglang_importance.http.token_text import text_of


def write_out_beginnings(document: dict[str, Any]) -> None:
    """
    Args:
        document: of one rank; each of its ``volatile`` gets ``before``, ``variants`` and ``after`` as texts,
            a ``sentence`` that says what happens, and a ``cure``.
    """
    for place in document["volatile"]:
        place["before"], place["after"] = text_of(place.pop("before_ids")), text_of(place.pop("after_ids"))
        place["variants"] = [text_of(ids) for ids in place.pop("variants_ids")]
        place |= {"sentence": sentence(place), "cure": CURE}
