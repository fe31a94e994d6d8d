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
_DRAFTS = "sglang.srt.speculative.spec_utils.traverse_tree"


def _after_set_cache(result: None, backend: BaseGrammarBackend, *args: Any) -> None:
    """sglang keeps every grammar that it has compiled, for ever."""
    if len(backend.cache) > MOST_GRAMMARS:
        backend.reset()


class SlowGrammars:
    """Those that took too long for a token; their requests end where sglang can end one."""

    def __init__(self) -> None:
        self._walks_drafts = False

    def around_fill(self, fill: Callable[..., None], grammar: Any, *args: Any) -> None:
        began = time.thread_time()
        fill(grammar, *args)
        if time.thread_time() - began > MOST_SECONDS and _serves_alone():
            setattr(grammar, _SLOW, True)

    def around_accept(self, accept: Callable[..., None], grammar: Any, token: int) -> None:
        self.around_fill(accept, grammar, token)
        if getattr(grammar, _SLOW, False) and not self._walks_drafts:
            raise ValueError(
                f"the grammar takes more than {MOST_SECONDS} s a token: give a less ambiguous one"
            )

    def around_drafts(self, walk: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """A speculative step tries its drafts on a grammar, where sglang takes no refusal: one would end the
        server. The request ends with the next token that it keeps."""
        self._walks_drafts = True
        try:
            walk(*args, **kwargs)
        finally:
            self._walks_drafts = False


def _serves_alone() -> bool:
    """Whether no other rank serves this one's requests."""
    ranks = get_parallel()
    return bool(ranks.attn_tp_size * ranks.attn_dcp_size == 1)


_SLOW_GRAMMARS = SlowGrammars()

HOOKS: dict[str, Hook] = {
    f"{_BACKEND}.set_cache": (_after_set_cache, HookType.AFTER),
    f"{_GRAMMAR}.fill_vocab_mask": (_SLOW_GRAMMARS.around_fill, HookType.AROUND),
    f"{_GRAMMAR}.accept_token": (_SLOW_GRAMMARS.around_accept, HookType.AROUND),
    _DRAFTS: (_SLOW_GRAMMARS.around_drafts, HookType.AROUND),
}
"""The hooks in each scheduler."""
