"""Pages brought at admission: the replay behind benchmark/pages/prefetch.py, on documents made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.pages.prefetch_replay import (
    MOST,
    RANKINGS,
    SELECTED,
    Events,
    Loads,
    PrefetchReplay,
    Step,
    prepare,
    run,
)
from benchmark.pages.slow_copies import slow_copies
from sgl_importance.settings import RESIDENCY_POLICIES
from sgl_importance.trace.page_steps import ListedRequest, Numbers, PageRecording, PageStep, RequestEnd
from sgl_importance_kernels.pages.page_slots import PageSlots

from support.workloads.recordings import make_header

PAGE, DOCUMENT, LAYERS, HEADS, ANSWER = 16, 40, 2, 2, 3


def step(
    request: int, forward_pass: int, seq_len: int, new: int, prompt: int, wanted: Sequence[int]
) -> PageStep:
    """A token that looks at some pages only, alike in every layer and head, the first of them most."""
    pages = np.tile(np.array(wanted), (LAYERS, HEADS, 1))
    mass = np.tile(np.linspace(0.2, 0.1, len(wanted), dtype=np.float32), (LAYERS, HEADS, 1))
    layers = tuple(range(LAYERS))
    is_generated = seq_len > prompt
    return PageStep(
        request, forward_pass, seq_len, new, is_generated, False, layers, pages, mass, (None,) * LAYERS
    )


def recording_of(wants: Sequence[tuple[int, Sequence[int]]]) -> PageRecording:
    """Requests one after the other: a document, and the pages of it that all tokens of the request look at.

    The first request for a document computes it; the others ask a page of tokens behind it.
    """
    requests: list[ListedRequest] = []
    events: list[PageStep | RequestEnd] = []
    known: dict[int, Numbers] = {}
    num_pages = passes = 0
    for number, (document, wanted) in enumerate(wants):
        prompt = (DOCUMENT + 1) * PAGE
        new = PAGE if document in known else prompt
        if document not in known:
            known[document] = np.arange(num_pages, num_pages + DOCUMENT)
            num_pages += DOCUMENT
        own = np.arange(num_pages, num_pages + 2)  # of the question and of the answer
        num_pages += 2
        pages = np.concatenate([known[document], own])
        requests.append(ListedRequest(f"fresh/{document}/{number}", prompt, ANSWER + 1, pages, DOCUMENT))
        for at in range(ANSWER + 1):
            passes += 1
            events.append(step(number, passes, prompt + at, new if at == 0 else 1, prompt, wanted))
        events.append(RequestEnd(number))
    header = make_header(page_size=PAGE)
    return PageRecording("by hand", header, requests, events, num_pages, 0)


def total(events: Events, ranking: str, budget: float, *, slots: int = 100, selects: bool = True) -> Loads:
    found = run(events, "lru", slots, ranking, budget, prompt_selects=selects)
    return Loads(*(sum(each) for each in zip(*map(astuple, found.values()), strict=True)))


# Two documents take turns, with a third between them that pushes out what eight slots hold.
SAME, OTHERS = (3, 11, 19, 27), (5, 6, 7, 8)
TURNS = [(0, SAME), (1, OTHERS), (0, SAME), (1, OTHERS), (0, SAME)]


def test_without_a_ranking_a_first_step_loads_what_it_reads() -> None:
    loads = total(prepare(recording_of(TURNS)), "none", 0.0, slots=4)
    assert (loads.questions, loads.brought, loads.streamed) == (3, 0, 0)
    assert loads.first == loads.first_read == 3 * LAYERS * len(SAME)
    assert loads.later == 0


@pytest.mark.parametrize("ranking", ["importance", "importance by layer", "lfu", "perfect"])
@pytest.mark.parametrize("selects", [True, False])
def test_what_earlier_queries_attended_to_is_there_when_they_come_again(ranking: str, selects: bool) -> None:
    loads = total(prepare(recording_of(TURNS)), ranking, SELECTED, slots=4, selects=selects)
    assert loads.brought == 3 * LAYERS * len(SAME)
    assert loads.first == loads.later == 0
    everything = 3 * LAYERS * DOCUMENT
    assert loads.streamed == (0 if selects else everything - loads.brought)


@pytest.mark.parametrize("ranking", ["uniform", "shuffled"])
def test_controls_know_nothing(ranking: str) -> None:
    loads = total(prepare(recording_of(TURNS)), ranking, SELECTED, slots=4)
    assert loads.brought > 0
    assert loads.first > loads.first_read / 2


def test_importance_is_that_of_earlier_queries_only() -> None:
    (first, second) = (
        each.question
        for each in prepare(recording_of([(0, SAME), (0, OTHERS), (0, SAME)])).events
        if isinstance(each, Step) and each.is_prompt and each.question is not None
    )
    assert set(np.flatnonzero(first.importance)) == set(SAME)
    assert set(np.flatnonzero(second.importance)) == {*SAME, *OTHERS}
    assert second.importance[list(OTHERS)].max() > second.importance[list(SAME)].min()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 39), min_size=4, max_size=4, unique=True)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(RESIDENCY_POLICIES),
    st.sampled_from(RANKINGS),
    st.sampled_from([SELECTED / 2, SELECTED, MOST]),
    st.integers(1, 60),
    st.booleans(),
    st.booleans(),
)
def test_what_is_brought_is_bounded_and_changes_no_read(
    wants: list[tuple[int, list[int]]],
    policy: str,
    ranking: str,
    budget: float,
    slots: int,
    selects: bool,
    has_prior: bool,
) -> None:
    events = prepare(recording_of(wants))
    arguments = {"prompt_selects": selects, "has_prior": has_prior}
    found = run(events, policy, slots, ranking, budget, **arguments)  # type: ignore[arg-type]
    none = run(events, policy, slots, "none", 0.0, **arguments)  # type: ignore[arg-type]
    assert found.keys() == none.keys()
    for name, loads in found.items():
        assert (loads.questions, loads.first_read) == (none[name].questions, none[name].first_read)
        assert loads.first <= loads.first_read
        assert loads.brought <= loads.questions * LAYERS * int(MOST * DOCUMENT)
        if ranking == "perfect" and budget >= SELECTED and slots >= 4:
            assert loads.first == 0
    if slots >= 20 and selects and events.num_pages <= slots:
        copies = [
            sum(each.brought + each.first + each.later for each in arm.values()) for arm in (found, none)
        ]
        assert copies[0] >= copies[1]


def test_a_prior_keeps_the_page_that_the_tree_finds_important() -> None:
    events = prepare(recording_of([(0, SAME)]))
    left = []
    for has_prior in (False, True):
        replay = PrefetchReplay(events, "importance", 2, has_prior=has_prior)
        replay.know(np.array([0, 1]), np.array([0.5, 0.1]))
        for pages in ([0, 1], [2]):
            replay.begin_pass()
            replay.read(0, np.array(pages), np.zeros(len(pages), np.float32))
        left.append(replay.is_resident(0, np.arange(3)).tolist())
    assert left == [[False, True, True], [True, False, True]]


# ---- throttling ----


def test_slow_copies_take_what_their_bytes_take(monkeypatch: pytest.MonkeyPatch) -> None:
    host = [[torch.zeros(4 * PAGE, 1, 1)] for _ in range(2)]
    slots = PageSlots(*host, num_frames=1, num_slots=3, page_size=PAGE, staging_pages=2, device="cpu")
    seconds = 0.001
    monkeypatch.setenv(slow_copies.BYTES_PER_SECOND, str(slots.page_bytes / seconds))
    slots.begin_pass(torch.tensor([], dtype=torch.int64))
    waits: list[float] = []
    monkeypatch.setattr(slow_copies.time, "sleep", waits.append)
    slow_copies.place_slowly(PageSlots.place, slots, 0, torch.tensor([1, 2]))
    assert waits == [pytest.approx(2 * seconds)]
    assert slots.traffic.load_seconds >= 2 * seconds
    slow_copies.place_slowly(PageSlots.place, slots, 0, torch.tensor([1, 2]))
    assert len(waits) == 1  # both are there
