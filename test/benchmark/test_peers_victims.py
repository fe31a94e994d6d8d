"""How benchmark/peers judges victims, what it takes from ``observe``, and tells LMCache about the model."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmark.peers import sglang_server
from benchmark.peers.served import CHUNK, token_bytes
from benchmark.peers.sizes import counts_of
from benchmark.peers.victims import NEVER, Compared, Foresight, Future, computed, trace_of
from benchmark.peers.workloads import PAGE, Sent
from sgl_importance.observe.shadow.shadow_cache import ShadowCache
from sgl_importance.observe.shadow.shadow_node import ShadowNode
from sgl_importance.observe.shadow.shadow_ranking import LruShadowRanking
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance_lab.replay.served_nodes import ServedPages

CAPACITY = 24


def asked_again(rng: Random) -> list[Sent]:
    """Four texts of eight pages, in random order."""
    texts = [[text * 1_000 + token for token in range(8 * PAGE)] for text in range(4)]
    return [Sent(number, rng.choice(texts)) for number in range(60)]


def test_every_victim_is_judged() -> None:
    trace = trace_of(asked_again(Random(1)))
    served = ServedPages(trace)
    future = Future(served, trace.num_requests)
    ours = Compared(CAPACITY, future, trace.num_requests)
    cache = ShadowCache(CAPACITY, PAGE, ours, spare_pages=1, chunk_tokens=CHUNK)
    for request in range(trace.num_requests):
        future.now = request
        cache.admit(str(request), served.prompt(request), int(trace.input_tokens[request]))
        cache.finish(str(request), served.with_answer(request), served.tokens(request), AnswerEnd.UNKNOWN)
    assert cache.evicted > 0
    assert ours.counts.total() == PAGE * cache.evicted


def test_who_knows_the_future_of_equal_texts_computes_less_than_recency() -> None:
    trace = trace_of(asked_again(Random(2)))
    served = ServedPages(trace)
    future = Future(served, trace.num_requests)
    recency, foresight = (
        computed(trace, served, CAPACITY, ranking, future)
        for ranking in (LruShadowRanking(), Foresight(future))
    )
    assert 4 * 8 * PAGE <= foresight < recency


def test_orders_are_counted_where_every_prompt_fits() -> None:
    requests = asked_again(Random(3))
    trace = trace_of(requests)
    served = ServedPages(trace)
    future = Future(served, trace.num_requests)
    counts = counts_of(requests, CAPACITY * PAGE, told=False)
    assert counts is not None
    assert counts["lru"] == computed(trace, served, CAPACITY, LruShadowRanking(), future)
    assert counts["foresight"] == computed(trace, served, CAPACITY, Foresight(future), future)
    assert min(counts.values()) >= 4 * 8 * PAGE
    assert counts_of(requests, 8 * PAGE, told=False) is None


def test_the_future_of_a_node_is_the_next_request_for_its_first_page() -> None:
    trace = trace_of([Sent(0, [1] * PAGE), Sent(1, [2] * PAGE), Sent(2, [1] * PAGE)])
    served = ServedPages(trace)
    future = Future(served, trace.num_requests)
    node = ShadowNode(1, None, served.prompt(0), 0)
    assert future.next_use(node) == 2
    future.now = 2
    assert future.next_use(node) == NEVER


def told(requests: Iterator[int]) -> sglang_server.Sglang:
    """A server whose shadows say that they have seen so many requests, one after the other."""
    found = {"lru_hit_tokens": 64, "importance_hit_tokens": 96}
    process = SimpleNamespace(get=lambda path: {"observe": {"requests": next(requests), **found}})
    return sglang_server.Sglang("", "", 0, 0, ["observe"], True, cast(Any, process), None)


def test_observe_is_asked_until_it_has_seen_what_was_sent_and_what_sglang_sends_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang_server.time, "sleep", lambda seconds: None)
    seen = iter((3, 4, 5, 6))
    predicted = told(seen).predicted(4)
    assert predicted == {"lru_hit_tokens": 64, "importance_hit_tokens": 96}
    assert next(seen) == 6
    with pytest.raises(AssertionError, match="saw 9 of 5 requests"):
        told(iter([9] * sglang_server.OBSERVED_SECONDS)).predicted(4)


def test_a_token_of_kv_in_float32() -> None:
    assert token_bytes({"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}) == 46_080
