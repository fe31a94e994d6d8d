"""Page lists through policies of residency: against the server's slots, and against the optimum."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance_kernels.sparse.page_slots import PageSlots
from sgl_importance_lab.replay.policy_registry import OPTIMUM
from sgl_importance_lab.replay.residency.fewest_loads import Read, fewest_loads
from sgl_importance_lab.replay.residency.page_replay import (
    PAGE_POLICIES,
    PageReplayError,
    Selection,
    check_selection,
    longest_context,
    run_policy,
)
from sgl_importance_lab.replay.residency.page_steps import PageRecording, load_page_steps
from sgl_importance_lab.replay.residency.residency_replay import ResidencyReplay

from support.workloads.page_recordings import Asked, random_asked, write_asked

PAGE, PAGES = 4, 12

reads = st.lists(
    st.tuples(
        st.booleans(),  # a new pass begins
        st.integers(0, 1),  # layer
        st.lists(st.integers(1, PAGES - 1), min_size=1, max_size=6, unique=True),
        st.booleans(),  # whether a selector chose them
    ),
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(reads, st.integers(1, 6), st.integers(0, 99))
def test_the_replay_loads_what_the_servers_slots_load(
    events: list[tuple[bool, int, list[int], bool]], slots: int, seed: int
) -> None:
    """``PageSlots`` with real keys and values, beside the replay without any."""
    host = [[torch.zeros(PAGES * PAGE, 1, 1) for _ in range(2)] for _ in range(2)]
    real = PageSlots(
        *host,
        num_frames=1,
        num_slots=slots + 1,
        page_size=PAGE,
        staging_pages=1,
        device="cpu",
    )
    replay = ResidencyReplay("lru", num_layers=2, num_pages=PAGES, num_slots=slots, staging_pages=1, seed=0)
    draws = np.random.default_rng(seed)
    for begins, layer, pages, is_chosen in events:
        if begins:
            real.begin_pass(torch.tensor([], dtype=torch.int64))
            replay.begin_pass()
        numbers = np.array(pages)
        shares = draws.random(len(pages), dtype=np.float32) if is_chosen else None
        before = real.traffic.loaded
        real.place(layer, torch.from_numpy(numbers), is_chosen=is_chosen)
        assert replay.read(layer, numbers, shares) == real.traffic.loaded - before
        everything = np.arange(PAGES)
        found = replay.is_resident(layer, everything)
        assert found.tolist() == real.is_resident(layer, torch.from_numpy(everything)).tolist()
        assert found.sum() <= slots
        replay.check_integrity()


def test_the_page_being_filled_needs_no_slot() -> None:
    replay = ResidencyReplay("lru", num_layers=1, num_pages=9, num_slots=2, staging_pages=4)
    pages, shares = np.array([1, 2, 3]), np.ones(3, np.float32)
    replay.begin_pass()
    assert replay.read(0, pages, shares, open_page=3) == 2
    replay.begin_pass()
    assert replay.read(0, pages, shares) == 1
    replay.forget(np.array([3]))
    replay.begin_pass()
    assert replay.read(0, pages[2:], shares[2:]) == 1


# ---- the optimum ----


def fewest_by_trying(accesses: Sequence[Read], num_slots: int) -> int:
    """Loads of the best of all choices of pages to keep behind each read."""
    kept: dict[frozenset[int], int] = {frozenset(): 0}
    for pages, counts in accesses:
        following: dict[frozenset[int], int] = {}
        for resident, loads in kept.items():
            now = loads + (len(set(pages.tolist()) - resident) if counts else 0)
            there = sorted(resident | set(pages.tolist()))
            for some in itertools.combinations(there, min(num_slots, len(there))):
                key = frozenset(some)
                following[key] = min(following.get(key, now), now)
        kept = following
    return min(kept.values())


accesses = st.lists(
    st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True).map(np.array), st.booleans()),
    min_size=1,
    max_size=7,
)


@settings(max_examples=200, deadline=None)
@given(accesses, st.integers(1, 4))
def test_the_optimum_is_that_of_trying_everything(some: list[Read], num_slots: int) -> None:
    assert sum(fewest_loads(some, 6, num_slots)) == fewest_by_trying(some, num_slots)


def recorded(asked: list[Asked], share: float = 1.0) -> PageRecording:
    with tempfile.TemporaryDirectory() as name:
        write_asked(Path(name), asked, share=share)
        return load_page_steps(Path(name))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 99),
    st.integers(1, 4),
    st.integers(1, 10),
    st.sampled_from([0.1, 0.3, 0.6]),
    st.booleans(),
)
def test_no_policy_loads_less_than_the_optimum(
    seed: int, requests: int, slots: int, share: float, is_chosen: bool
) -> None:
    asked = random_asked(seed, requests=requests, tokens=7, heads=2)
    if is_chosen:
        draws = np.random.default_rng(seed)
        chosen = [sorted(draws.permutation(10)[:4].tolist()) for _ in range(7)]
        asked = [Asked(each.document, each.prompt_pages, each.wants, chosen) for each in asked]
    recording = recorded(asked)
    selection = Selection(0.0 if is_chosen else share)
    optimum = run_policy(recording, OPTIMUM, slots, selection)
    for policy in PAGE_POLICIES:
        found = run_policy(recording, policy, slots, selection)
        np.testing.assert_array_equal(found.read, optimum.read)
        np.testing.assert_allclose(found.mass, optimum.mass, rtol=1e-5)  # sums in another order
        assert (found.loaded <= found.read).all()
        assert found.loaded.sum() >= optimum.loaded.sum(), policy
        for counts in (found, optimum):
            chose = counts.loaded_by_event >= 0
            assert chose.sum() == sum(1 for step in recording.steps if step.is_generated)
            assert counts.loaded_by_event[chose].sum() == counts.loaded.sum()


# ---- what is read ----


def test_the_pages_of_most_attention_are_read_and_loaded_once_where_all_fit() -> None:
    recording = recorded(random_asked(5, requests=1, tokens=6, layers=2, heads=2))
    counts = run_policy(recording, "lru", 100, Selection(0.3))
    steps = [step for step in recording.steps if step.is_generated]
    per_table = [int(0.3 * -(-step.seq_len // recording.page_size)) for step in steps]
    assert counts.read.tolist() == [4 * sum(per_table)]
    assert counts.heads.tolist() == [4 * len(steps)]
    best = sum(float(step.mass[..., :count].sum()) for step, count in zip(steps, per_table, strict=True))
    assert counts.mass[0] == pytest.approx(best, rel=1e-5)
    wanted = set()
    first_loads = 0
    pages = recording.requests[0].pages
    for step, count in zip(steps, per_table, strict=True):
        open_page = int(pages[-(-step.seq_len // recording.page_size) - 1])
        for layer, head in itertools.product(range(2), range(2)):
            for page in pages[step.wanted[layer, head, :count]].tolist():
                if page != open_page and (layer, head, page) not in wanted:
                    wanted.add((layer, head, page))
                    first_loads += 1
    assert counts.loaded.tolist() == [first_loads]


def test_a_bias_keeps_to_what_is_resident() -> None:
    recording = recorded(random_asked(6, requests=4, tokens=12))
    independent, joint = (run_policy(recording, "ema", 4, Selection(0.3, bias)) for bias in (0.0, 1000.0))
    assert joint.loaded.sum() < independent.loaded.sum() / 2
    assert joint.mass.sum() < independent.mass.sum()


@pytest.mark.parametrize("policy", ["lru", OPTIMUM])
def test_a_token_costs_no_look_at_all_others(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    recording = recorded(random_asked(0, requests=4, tokens=8))
    looks, steps = [], recording.steps
    monkeypatch.setattr(PageRecording, "steps", property(lambda _: looks.append(0) or steps))
    run_policy(recording, policy, 3, Selection(0.3))
    assert len(looks) == 1


def test_what_the_recording_does_not_say_is_one_line() -> None:
    asked = random_asked(7, requests=1)
    listed = recorded(asked, share=0.2)
    check_selection(listed, Selection(0.2))
    with pytest.raises(
        PageReplayError, match=r"lists hold \d+% of the pages: select at most that, or record"
    ):
        check_selection(listed, Selection(0.5))
    with pytest.raises(PageReplayError, match="no selector chose pages while it was recorded"):
        check_selection(listed, Selection(0.0))
    assert longest_context(listed) == -(-(asked[0].prompt_tokens + 6) // 4)
