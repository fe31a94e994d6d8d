"""Token ids as the text that the server's tokenizer makes of them."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_importance.http.server_state import tokenizer_manager


def text_of(ids: Sequence[int]) -> str:
    """The text; the numbers themselves where there is no tokenizer, or none for these."""
    tokenizer = tokenizer_manager().tokenizer
    if tokenizer is None:  # --skip-tokenizer-init
        return _numbers(ids)
    try:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))
    except Exception:  # a model may have more ids than its tokenizer; some raise at those
        return _numbers(ids)


def _numbers(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))
