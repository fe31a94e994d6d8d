"""Rules for numbers in the place of tokens: their KV would lie under ids that are not theirs."""

from __future__ import annotations

import math
from typing import Any

from sglang_importance.http.requests.fields.field import needs
from sglang_importance.http.requests.fields.refusal import shown
from sglang_importance.http.requests.fields.server_facts import ServerFacts

_WITHOUT = "the server shares KV by token ids (it would need --disable-radix-cache)"


def _without_cache(server: ServerFacts) -> bool:
    return not server.has_radix_cache


def _rows(value: Any, server: ServerFacts) -> str | None:
    if not isinstance(value, list | tuple) or not value:
        return f"must be a list of embeddings, not {shown(value)}"
    for row in value:
        if not isinstance(row, list | tuple) or len(row) != server.hidden_size:
            return f"must be a list of embeddings of {server.hidden_size} numbers each"
        if not all(type(number) is float and math.isfinite(number) for number in row):
            return "must hold finite numbers with a decimal point"
    return None


def _overrides(value: Any, server: ServerFacts) -> str | None:
    """``PositionalEmbeds``, which only sglang's own routes and an engine's caller can make."""
    embeds, places = getattr(value, "embeds", None), getattr(value, "positions", None)
    if not isinstance(embeds, list) or not isinstance(places, list) or len(embeds) != len(places):
        return f"must be PositionalEmbeds, which no request body can hold, not {shown(value)}"
    if not all(getattr(each, "shape", ())[-1:] == (server.hidden_size,) for each in embeds):
        return f"must hold embeddings of {server.hidden_size} numbers"
    if not all(type(each) is int and 0 <= each < server.context_length for each in places):
        return "must hold positions in the prompt"
    return None


embeddings = needs(_without_cache, _WITHOUT, _rows)
overrides = needs(_without_cache, _WITHOUT, _overrides)
override_lists = needs(_without_cache, _WITHOUT, lambda value, server: None)
