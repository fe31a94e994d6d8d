"""What clients' grammars may take of a scheduler: bounded in memory, and in time a token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend

from sglang_importance.scheduler import grammars


class Grammar:
    """Takes some seconds of a clock that tests set."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.takes = 0.0

    def step(self, *args: Any) -> None:
        self.clock[0] += self.takes


def ranks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    served = SimpleNamespace(attn_tp_size=number, attn_dcp_size=1)
    monkeypatch.setattr(grammars, "get_parallel", lambda: served)


def test_ranks_that_must_agree_go_on_with_a_slow_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(grammars.time, "thread_time", lambda: clock[0])
    ranks(monkeypatch, 2)
    grammar = Grammar(clock)
    grammar.takes = 2 * grammars.MOST_SECONDS
    grammars._around_fill(Grammar.step, grammar, None, 0)
    grammars._around_accept(Grammar.step, grammar, 5)


def test_a_slow_grammar_ends_its_request_at_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(grammars.time, "thread_time", lambda: clock[0])
    ranks(monkeypatch, 1)
    grammar, other = Grammar(clock), Grammar(clock)
    for each in (grammar, other):
        grammars._around_fill(Grammar.step, each, None, 0)
        grammars._around_accept(Grammar.step, each, 5)
    grammar.takes = 2 * grammars.MOST_SECONDS
    grammars._around_fill(Grammar.step, grammar, None, 0)
    grammar.takes = 0.0
    with pytest.raises(ValueError, match="a less ambiguous one"):  # at which sglang aborts it
        grammars._around_accept(Grammar.step, grammar, 5)
    grammars._around_accept(Grammar.step, other, 5)


def test_grammars_are_kept_up_to_a_bound() -> None:
    backend = BaseGrammarBackend()
    for number in range(3 * grammars.MOST_GRAMMARS):
        backend.set_cache(("regex", str(number)), None)  # type: ignore[arg-type]
        grammars._after_set_cache(None, backend)
        assert len(backend.cache) <= grammars.MOST_GRAMMARS
    assert backend.cache
