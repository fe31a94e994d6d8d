"""What grammars that clients write may take of a scheduler: a bounded memory, and a bounded time a token.

An ambiguous grammar takes longer with every token, and everybody's next token waits for it: its request is
aborted, as sglang aborts one whose token the grammar does not take. Ranks that serve the same requests have
clocks of their own and must agree, so beside others a rank aborts none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_parallel

from sglang_importance.upstream.hooks import Hook, HookType

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend

MOST_GRAMMARS = 256
"""Compiled ones that are kept; each takes up to some megabytes."""
MOST_SECONDS = 0.5
"""Processor time of the scheduler's thread, for one token of one request."""
_SLOW = "kv_importance_is_slow"
_BACKEND = "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend"
_GRAMMAR = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar"


def _after_set_cache(result: None, backend: BaseGrammarBackend, *args: Any) -> None:
    """sglang keeps every grammar that it has compiled, for ever."""
    if len(backend.cache) > MOST_GRAMMARS:
        backend.reset()


def _around_fill(fill: Callable[..., None], grammar: Any, *args: Any) -> None:
    began = time.thread_time()
    fill(grammar, *args)
    if time.thread_time() - began > MOST_SECONDS and _serves_alone():
        setattr(grammar, _SLOW, True)


def _serves_alone() -> bool:
    """Whether no other rank serves this one's requests."""
    ranks = get_parallel()
    return bool(ranks.attn_tp_size * ranks.attn_dcp_size == 1)


def _around_accept(accept: Callable[..., None], grammar: Any, token: int) -> None:
    _around_fill(accept, grammar, token)
    if getattr(grammar, _SLOW, False):
        raise ValueError(f"the grammar takes more than {MOST_SECONDS} s a token: give a less ambiguous one")


HOOKS: dict[str, Hook] = {
    f"{_BACKEND}.set_cache": (_after_set_cache, HookType.AFTER),
    f"{_GRAMMAR}.fill_vocab_mask": (_around_fill, HookType.AROUND),
    f"{_GRAMMAR}.accept_token": (_around_accept, HookType.AROUND),
}
"""The hooks in each scheduler."""
