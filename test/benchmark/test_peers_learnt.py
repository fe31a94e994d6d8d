"""From whom a shadow of benchmark/peers learns before it is measured, and how it is counted."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.peers.learnt import LOADS, Load, earlier_sessions, row_of, thirds
from benchmark.peers.recorded import Cut, coding
from benchmark.peers.workloads import PAGE, Sent, agents, until_unique

SEEDS = range(1, 9)
TASKS, TOKENS = 8, 4 * PAGE


def sessions(recorded: object) -> list[Cut]:
    """Twelve of each kind, of three turns, behind an instruction of two pages; the last four begin with the
    tasks of the first four."""
    found = []
    for session in range(12):
        task = 1_000_000 * (recorded is coding) + 10_000 * (session % TASKS)
        text = [*range(2 * PAGE), *range(task, task + TOKENS)]
        own = range(task + 1_000 * (session + 1), task + 1_000 * (session + 1) + 2 * TOKENS)
        found.append(Cut([[*text, *own[: TOKENS * turn]] for turn in range(3)], 0))
    return found


@pytest.fixture(scope="module")
def texts() -> Any:
    return SimpleNamespace(sessions=sessions)


def tasks(requests: list[Sent]) -> set[int]:
    return {request.ids[2 * PAGE] for request in requests}


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_learnt_from_the_sessions_that_are_measured_nor_from_their_tasks(
    texts: Any, seed: int
) -> None:
    requests = until_unique(agents(texts, Random(f"agents/{seed}")), 80 * PAGE)
    earlier = earlier_sessions(texts, seed, requests)
    assert earlier
    assert not tasks(earlier) & tasks(requests)
    whole = list(agents(texts, Random(f"agents/{seed}")))
    ends = {tuple(request.ids) for request in whole}
    assert {tuple(request.ids) for request in [*earlier, *requests]} <= ends
    left_out = {request.session for request in whole} - {each.session for each in [*earlier, *requests]}
    assert all(request.ids[2 * PAGE] in tasks(requests) for request in whole if request.session in left_out)


def test_who_learns_first_is_measured_on_the_same_requests_and_starts_empty(texts: Any) -> None:
    """Where everything fits, all compute each page once: none has kept what it had learnt from."""
    load = Load("fits", unique=60 * PAGE, pool=400 * PAGE, is_learnt=True)
    row = row_of(load, 1, texts)
    assert row["earlier"] > 0
    counts = {name: row[name] for name in ("lru", "ours", "foresight", "goes on", "tables", "ledger")}
    assert len({tuple(each) for each in counts.values()}) == 1, counts
    again = row_of(load._replace(is_learnt=False), 1, texts)
    assert (again["requests"], again["lru"]) == (row["requests"], row["lru"])
    assert "ledger" not in again


@given(st.lists(st.integers(0, 99)))
def test_thirds_hold_every_request(computed: list[int]) -> None:
    assert len(thirds(computed)) == 3
    assert sum(thirds(computed)) == sum(computed)


def test_the_first_load_is_the_one_that_servers_get() -> None:
    assert (LOADS[0].unique, LOADS[0].pool, LOADS[0].alive) == (32_768, 8_192, 4)
