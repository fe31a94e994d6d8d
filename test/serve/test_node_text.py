"""The text of a node, where its tokens have some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_importance.http import tree_route
from sglang_importance.http.tree_route import text_of


class ShortTokenizer:
    """Has text for fewer ids than its model, and raises at the others, as tiktoken does."""

    def decode(self, ids: list[int], **_: Any) -> str:
        if max(ids) >= 26:
            raise KeyError(f"Invalid token for decoding: {max(ids)}")
        return "".join(chr(ord("a") + token) for token in ids)


@pytest.mark.parametrize(
    ("tokenizer", "ids", "text"),
    [
        (ShortTokenizer(), [7, 8], "hi"),
        (ShortTokenizer(), [7, 99], "7 99"),
        (None, [7, 8], "7 8"),
    ],
)
def test_tokens_without_text_are_shown_as_numbers(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any, ids: list[int], text: str
) -> None:
    monkeypatch.setattr(tree_route, "tokenizer_manager", lambda: SimpleNamespace(tokenizer=tokenizer))
    assert text_of(ids) == text
