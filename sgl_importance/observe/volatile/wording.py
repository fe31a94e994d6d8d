"""What an operator reads of a volatile beginning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CURE = "move it behind the text that stays the same, or strip it in the client"


def sentence(place: Mapping[str, Any]) -> str:
    """One place in one line.

    Args:
        place: of ``VolatileBeginnings.places``, with ``variants`` as texts.
    """
    one, other = (" ".join(text.split()) for text in place["variants"])
    return (
        f"prompts part at token {place['start_token']:,} ({one!r}, then {other!r}) and go on alike: "
        f"{place['lost_tokens']:,} tokens behind it computed again in {place['prompts']:,} prompts, "
        f"{place['lost_tokens_per_day']:,} a day at this rate"
    )
