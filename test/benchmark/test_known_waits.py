"""What an order could win on benchmark/peers' agents that knows all but what chance decides."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmark.peers.known_waits import AGES, retention_index, row_of
from benchmark.peers.learnt import Load
from benchmark.peers.recorded import Cut, coding
from benchmark.peers.workloads import PAGE, WAIT_SIGMA, in_turns


@pytest.fixture(scope="module")
def texts() -> Any:
    def sessions(recorded: object) -> list[Cut]:
        """Forty of each kind, of one to six turns that grow by two pages."""
        found = []
        for number in range(40):
            first = 1_000_000 * (recorded is coding) + 10_000 * number
            turns = 1 + number % 6
            found.append(
                Cut([list(range(first, first + 2 * PAGE * turn)) for turn in range(1, turns + 1)], 0)
            )
        return found

    return SimpleNamespace(sessions=sessions)


@pytest.mark.parametrize("goes_on", [1.0, 0.9])
def test_the_index_is_the_best_rate_of_returns_in_simulated_waits(goes_on: float) -> None:
    rng = np.random.default_rng(1)
    waits = rng.lognormal(0.0, WAIT_SIGMA, 400_000)
    waits[rng.random(len(waits)) >= goes_on] = np.inf
    index = retention_index(goes_on)
    for age in (0.1, 1.0, 3.0):
        left = waits[waits > age] - age
        rates = [(left <= span).sum() / np.minimum(left, span).sum() for span in np.geomspace(0.05, 50, 60)]
        assert index[np.searchsorted(AGES, age)] == pytest.approx(max(rates), rel=0.03)


def test_who_knows_more_computes_less(texts: Any) -> None:
    load = Load("small", unique=900 * PAGE, pool=40 * PAGE, alive=8)
    rows = [row_of(load, seed, texts) for seed in range(1, 6)]
    orders = ("foresight", "waits and ends", "lru")
    best, told, recency = (sum(row[order] for row in rows) for order in orders)
    assert best < told < recency
    assert sum(row["ours (told)"] for row in rows) < sum(row["ours"] for row in rows)


def test_a_turn_says_when_it_came_and_whether_it_is_the_last() -> None:
    lengths = [1 + number % 4 for number in range(30)]
    sessions = iter([[[number]] * length for number, length in enumerate(lengths)])
    requests = list(in_turns(sessions, 3, Random(2)))
    assert [request.time for request in requests] == sorted(request.time for request in requests)
    for number, length in enumerate(lengths):
        own = [request.is_last for request in requests if request.session == number]
        assert own == [False] * (length - 1) + [True]
