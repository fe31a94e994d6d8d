"""Replay of page requests against naive simulations, and the optimum against all there is."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance_lab.study.recording import Query
from sgl_importance_lab.study.residency import POLICIES, replay, requested
from sgl_importance_lab.study.streams import StepScores, Stream, streams

from support.workloads.recordings import make_query, make_recording, make_step

PAGES = 6


def make_stream(masses: list[list[float]]) -> Stream:
    steps = [StepScores(np.arange(PAGES), np.array(mass), np.array(mass)) for mass in masses]
    return Stream("hand", "one answer", 64, PAGES, np.arange(PAGES), steps)


masses = st.lists(
    st.lists(st.integers(0, 9).map(float), min_size=PAGES, max_size=PAGES), min_size=1, max_size=7
)


def asked_sets(stream: Stream, share: float) -> list[frozenset[int]]:
    return [frozenset(requested(step, share).tolist()) for step in stream.steps]


def best_possible(sets: list[frozenset[int]], budget: int) -> int:
    """Tries every way to keep pages that are or were just asked for."""

    @cache
    def best(index: int, held: frozenset[int]) -> int:
        if index == len(sets):
            return 0
        pool = held | sets[index]
        keep = [frozenset(c) for size in range(min(budget, len(pool)) + 1) for c in combinations(pool, size)]
        return len(held & sets[index]) + max(best(index + 1, kept) for kept in keep)

    return best(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(masses, st.sampled_from([0.2, 0.34, 0.5]), st.integers(1, 4))
def test_the_optimum_is_optimal_and_nobody_beats_it(
    masses: list[list[float]], share: float, budget: int
) -> None:
    stream = make_stream(masses)
    sets = asked_sets(stream, share)
    optimum = replay(stream, "optimum", share=share, budget_pages=budget)
    assert optimum.hits == best_possible(sets, budget)
    for policy in POLICIES:
        hits = replay(stream, policy, share=share, budget_pages=budget)
        assert hits.requests == sum(map(len, sets))
        assert hits.hits <= optimum.hits, policy


def naive(stream: Stream, share: float, budget: int, policy: str) -> int:
    held: set[int] = set()
    last: dict[int, int] = {}
    count: dict[int, int] = {}
    hits = 0
    for index, asked in enumerate(asked_sets(stream, share)):
        hits += len(held & asked)
        for page in asked:
            last[page] = index
            count[page] = count.get(page, 0) + 1
        held |= asked
        key = {
            "lru": lambda page: (last[page], page),
            "lfu": lambda page: (count[page], last[page], page),
        }[policy]
        while len(held) > budget:
            held.remove(min(held, key=key))
    return hits


@settings(max_examples=100, deadline=None)
@given(masses, st.sampled_from([0.2, 0.34, 0.5]), st.integers(1, 5), st.sampled_from(["lru", "lfu"]))
def test_lru_and_lfu_agree_with_naive_ones(
    masses: list[list[float]], share: float, budget: int, policy: str
) -> None:
    stream = make_stream(masses)
    hits = replay(stream, policy, share=share, budget_pages=budget).hits
    assert hits == naive(stream, share, budget, policy)


def test_scores_of_a_step_do_not_help_that_step() -> None:
    # Page 3 is asked for once: nobody may have it before.
    stream = make_stream([[9, 0, 0, 0, 0, 0], [0, 0, 0, 9, 0, 0]])
    for policy in POLICIES:
        assert replay(stream, policy, share=0.17, budget_pages=PAGES).hits == 0


def test_mass_keeps_a_page_that_recency_forgets() -> None:
    # Page 0 is asked for twice and always seen; pages 4 and 5 pass by in between.
    stream = make_stream([[9, 0, 0, 0, 0, 0], [5, 0, 0, 0, 6, 0], [5, 0, 0, 0, 0, 6], [9, 0, 0, 0, 0, 0]])
    hits = {p: replay(stream, p, share=0.17, budget_pages=1).hits for p in ("lru", "ema", "optimum")}
    assert hits == {"lru": 0, "ema": 1, "optimum": 1}


def test_recency_and_sinks_keep_the_first_page_and_the_last() -> None:
    stream = make_stream([[9, 8, 0, 0, 0, 7], [9, 0, 0, 0, 0, 8], [0, 9, 0, 0, 0, 0]])
    assert replay(stream, "recency+sinks", share=0.5, budget_pages=2).hits == 3


def short(request: int, step: list[float], context: list[int]) -> Query:
    return make_query([*context, 100 + request], rid=f"documents/0/{request}", decode=[make_step(step)] * 3)


def test_short_answers_on_one_context_are_one_stream() -> None:
    context = list(range(10))
    queries = [short(i, [1] * 10 + [5, 6], context) for i in range(9)]
    (stream,) = streams(make_recording(queries))
    assert (stream.reading, len(stream.steps)) == ("shared context", 27)
    # Eleven pages are known; the twelfth is not full yet and belongs to its request alone.
    first, second = stream.steps[0].pages.tolist(), stream.steps[3].pages.tolist()
    assert first[:10] == second[:10]
    assert not set(first[10:]) & set(second[10:])
    assert stream.num_pages == 10 + 2 * 9
    assert stream.positions[first].tolist() == list(range(12))


def test_a_long_answer_is_a_stream_of_its_own() -> None:
    queries = [make_query(range(10), decode=[make_step([1] * 10)] * 30) for _ in range(2)]
    assert [stream.reading for stream in streams(make_recording(queries))] == ["one answer"] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_for_everything_hits_all_but_first_requests(policy: str) -> None:
    stream = make_stream([[9, 8, 0, 0, 0, 0], [0, 0, 9, 8, 0, 0], [9, 0, 8, 0, 0, 0]])
    assert replay(stream, policy, share=0.34, budget_pages=PAGES).hits == 2
