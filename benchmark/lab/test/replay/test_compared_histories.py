"""Policies of residency that learn from choices, which no server offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance_kernels.sparse.page_history import DECAY
from sgl_importance_lab.replay.residency.compared_histories import Fading, FadingHistory
from sgl_importance_lab.replay.residency.residency_replay import ResidencyReplay

reads = st.lists(st.sets(st.integers(0, 5), max_size=4), min_size=1, max_size=12)


@given(reads)
def test_worth_is_what_the_choices_say(passes: list[set[int]]) -> None:
    """Page p is chosen for a share of p / 10. In pass 2 all pages are streamed, too."""
    now = len(passes) - 1

    def summed(of_choice: Callable[[int, int], float]) -> list[float]:
        return [
            sum(of_choice(page, at) for at, some in enumerate(passes) if page in some) for page in range(6)
        ]

    expected = {
        "lfu": summed(lambda page, at: 1),
        "ema": summed(lambda page, at: DECAY ** (now - at)),
        "importance": summed(lambda page, at: page / 10 * DECAY ** (now - at)),
    }
    for policy in get_args(Fading):
        history = FadingHistory(policy, 2, 6)
        for at, some in enumerate(passes):
            pages = torch.tensor(sorted(some), dtype=torch.int64)
            history.shares = pages / 10
            history.read(1, pages, at, is_chosen=True)
            if at == 2:
                history.read(1, torch.arange(6), at, is_chosen=False)
        pages = torch.arange(6)
        worth = history.worth(1, pages, history.last_read(1, pages), now)
        torch.testing.assert_close(worth, torch.tensor(expected[policy], dtype=torch.float32))
        history.forget(torch.tensor([3]))
        forgotten = torch.tensor([3])
        assert history.worth(1, forgotten, history.last_read(1, forgotten), now).item() == 0


@pytest.mark.parametrize(("policy", "leaves"), [("lru", 1), ("lfu", 3), ("ema", 3), ("importance", 2)])
def test_who_leaves(policy: str, leaves: int) -> None:
    """Page 1 is chosen most often, page 3 last, page 2 for the least attention; then page 4 comes."""
    replay = ResidencyReplay(policy, num_layers=1, num_pages=9, num_slots=3, staging_pages=4)
    attention = {1: 0.1, 2: 0.05, 3: 0.2, 4: 0.1}
    for page in (1, 1, 1, 2, 2, 3, 4):
        replay.begin_pass()
        replay.read(0, np.array([page]), np.array([attention[page]], np.float32))
        replay.check_integrity()
    assert set(np.flatnonzero(replay.is_resident(0, np.arange(9)))) == {1, 2, 3, 4} - {leaves}
