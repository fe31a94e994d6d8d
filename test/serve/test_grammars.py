"""What clients' grammars may take of a scheduler: bounded in memory, and in time a token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
from sglang.srt.speculative.spec_utils import traverse_tree

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
    grammar, slow = Grammar(clock), grammars.SlowGrammars()
    grammar.takes = 2 * grammars.MOST_SECONDS
    slow.around_fill(Grammar.step, grammar, None, 0)
    slow.around_accept(Grammar.step, grammar, 5)


def test_a_slow_grammar_ends_its_request_at_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(grammars.time, "thread_time", lambda: clock[0])
    ranks(monkeypatch, 1)
    grammar, other, slow = Grammar(clock), Grammar(clock), grammars.SlowGrammars()
    for each in (grammar, other):
        slow.around_fill(Grammar.step, each, None, 0)
        slow.around_accept(Grammar.step, each, 5)
    grammar.takes = 2 * grammars.MOST_SECONDS
    slow.around_fill(Grammar.step, grammar, None, 0)
    grammar.takes = 0.0
    with pytest.raises(ValueError, match="a less ambiguous one"):  # at which sglang aborts it
        slow.around_accept(Grammar.step, grammar, 5)
    slow.around_accept(Grammar.step, other, 5)


def test_drafts_that_are_tried_on_a_slow_grammar_end_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a reasoning model's wrapper, too; sglang's walk takes no refusal."""
    clock = [0.0]
    monkeypatch.setattr(grammars.time, "thread_time", lambda: clock[0])
    ranks(monkeypatch, 1)
    slow, tried = grammars.SlowGrammars(), []
    wrapped = Grammar(clock)
    wrapped.takes = 2 * grammars.MOST_SECONDS

    def accept(token: int) -> None:
        slow.around_accept(Grammar.step, wrapped, token)
        tried.append(token)

    reasoner: Any = SimpleNamespace(
        accept_token=accept,
        fill_vocab_mask=lambda mask, at: slow.around_fill(Grammar.step, wrapped, mask, at),
        is_terminated=lambda: False,
        rollback=lambda tokens: None,
    )
    nothing, chain = torch.tensor([-1, -1, -1]), torch.tensor([1, 2, -1])
    every_token = torch.full((3, 1), -1, dtype=torch.int32)
    slow.around_drafts(traverse_tree, chain, nothing, torch.tensor([3, 4, 5]), reasoner, every_token)
    assert tried == [4, 5]
    with pytest.raises(ValueError, match="a less ambiguous one"):
        slow.around_accept(Grammar.step, wrapped, 4)


def test_grammars_are_kept_up_to_a_bound() -> None:
    backend = BaseGrammarBackend()
    for number in range(3 * grammars.MOST_GRAMMARS):
        backend.set_cache(("regex", str(number)), None)  # type: ignore[arg-type]
        grammars._after_set_cache(None, backend)
        assert len(backend.cache) <= grammars.MOST_GRAMMARS
    assert backend.cache
