"""Pages in two tiers, against a pool that has everything in one place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sgl_importance_kernels.sparse.open_pages import OpenPages
from sgl_importance_kernels.sparse.page_slots import PageSlots
from sgl_importance_kernels.sparse.selectors.registry import AllKeys

PAGE, LAYERS, PAGES, FRAMES = 4, 2, 24, 3
HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5


def empty_pool(dim: int) -> list[torch.Tensor]:
    return [torch.zeros(PAGES * PAGE, HEADS, dim) for _ in range(LAYERS)]


@pytest.mark.parametrize("completed", [(0,), (0, 1)])
def test_padding_that_is_told_as_completed_gives_no_frame_back(completed: tuple[int, ...]) -> None:
    pages = OpenPages(2, PAGES, PAGE, "cpu")
    pages.plan_step(torch.tensor([PAGE, 2 * PAGE]), [])
    assert pages.page_in.tolist() == [1, 2]
    pages.plan_step(torch.tensor([0, 2 * PAGE + 1]), completed)
    pages.close_completed()
    pages.check_integrity()
    assert pages.page_in.tolist() == [1, -1 if 1 in completed else 2]


class TieredPool(RuleBasedStateMachine):
    """Requests that grow by some tokens at a time, are read, and end."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = [empty_pool(KEY_DIM), empty_pool(VALUE_DIM)]
        self.slots = PageSlots(
            empty_pool(KEY_DIM),
            empty_pool(VALUE_DIM),
            num_frames=FRAMES,
            num_slots=FRAMES + 4,
            page_size=PAGE,
            staging_pages=3,
            device="cpu",
            selector=AllKeys(PAGE),
        )
        self.free = list(range(1, PAGES))
        self.requests: list[tuple[list[int], int]] = []  # pages and tokens of each
        self.draws = torch.Generator().manual_seed(0)

    def grow(self, request: int, tokens: int) -> list[int]:
        """Locations of a request's next tokens."""
        pages, length = self.requests[request]
        while len(pages) * PAGE < length + tokens:
            pages.append(self.free.pop())
        self.requests[request] = (pages, length + tokens)
        return [pages[at // PAGE] * PAGE + at % PAGE for at in range(length, length + tokens)]

    def write(self, locations: list[int]) -> None:
        at = torch.tensor(locations)
        plan = self.slots.begin_pass(at)
        for layer in range(LAYERS):
            keys = torch.randn(len(at), HEADS, KEY_DIM, generator=self.draws)
            values = torch.randn(len(at), HEADS, VALUE_DIM, generator=self.draws)
            self.slots.write(layer, plan, keys, values)
            self.dense[0][layer][at], self.dense[1][layer][at] = keys, values

    def room(self) -> int:
        return len(self.free)

    @precondition(lambda self: len(self.requests) < FRAMES and self.room() >= 3)
    @rule(tokens=st.integers(1, 3 * PAGE))
    def start(self, tokens: int) -> None:
        self.requests.append(([], 0))
        self.write(self.grow(len(self.requests) - 1, tokens))

    @precondition(lambda self: self.requests and self.room() >= len(self.requests))
    @rule(padding=st.booleans())
    def decode(self, padding: bool) -> None:
        locations = [location for request in range(len(self.requests)) for location in self.grow(request, 1)]
        self.write(locations + [0] * padding)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        pages, length = data.draw(st.sampled_from(self.requests))
        some = st.lists(st.sampled_from(pages), min_size=1, max_size=3, unique=True)
        chosen = torch.tensor(data.draw(some))
        layer = data.draw(st.integers(0, LAYERS - 1))
        before = self.slots.traffic.read
        found = self.slots.read(layer, chosen, is_chosen=data.draw(st.booleans()))
        assert self.slots.traffic.read == before + len(chosen)
        self.check(pages, length, chosen, layer, *found)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def read_in_place(self, data: st.DataObject) -> None:
        """All requests at once, each any pages of its own."""
        layer = data.draw(st.integers(0, LAYERS - 1))
        chosen = [data.draw(st.permutations(pages)) for pages, _ in self.requests]
        flat = torch.tensor([page for pages in chosen for page in [*pages, -1]])
        before = self.slots.traffic.read
        places = self.slots.place(layer, flat, is_chosen=data.draw(st.booleans()))
        assert self.slots.traffic.read == before + int((flat >= 0).sum())
        everywhere = [
            torch.cat([kept[layer], host])
            for kept, host in zip((self.slots.keys, self.slots.values), self.slots.host[layer], strict=True)
        ]
        for (pages, length), own, of_row in zip(
            self.requests, chosen, places.split([len(own) + 1 for own in chosen]), strict=True
        ):
            assert int(of_row[-1]) == -1
            found = [buffer[of_row[:-1]].flatten(0, 1) for buffer in everywhere]
            self.check(pages, length, torch.tensor(own), layer, *found)

    def check(
        self, pages: list[int], length: int, chosen: torch.Tensor, layer: int, *found: torch.Tensor
    ) -> None:
        """Keys and values of pages of a request are those of the dense pool."""
        # What lies behind a request's last token is whatever was there before.
        written = torch.tensor(
            [pages.index(page) * PAGE + offset < length for page in chosen.tolist() for offset in range(PAGE)]
        )
        for tensor, dense in zip(found, self.dense, strict=True):
            expected = dense[layer].view(PAGES, PAGE, HEADS, -1)[chosen].flatten(0, 1)
            assert torch.equal(tensor[written], expected[written])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def represent(self, data: st.DataObject) -> None:
        """Of complete pages, in any order and however they came; ``check_integrity`` compares."""
        pages, length = data.draw(st.sampled_from(self.requests))
        assert self.slots.representations is not None
        complete = torch.tensor(pages[: length // PAGE], dtype=torch.int64)
        self.slots.representations.of(data.draw(st.integers(0, LAYERS - 1)), complete)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        pages, _ = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.slots.forget(torch.tensor(pages))
        self.free += pages

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def copy_through_the_host(self, data: st.DataObject) -> None:
        """What a request that waits on the CPU goes through: its pages come back where others were."""
        at = data.draw(st.integers(0, len(self.requests) - 1))
        pages, length = self.requests[at]
        for layer in range(LAYERS):
            self.slots.flush(layer)
        self.slots.forget(torch.tensor(pages))
        self.requests[at] = (pages, length)

    @rule()
    def clear(self) -> None:
        self.slots.clear()
        for pages, _ in self.requests:
            self.free += pages
        self.requests.clear()

    @invariant()
    def tables_agree(self) -> None:
        self.slots.check_integrity()

    @invariant()
    def the_host_has_every_complete_page(self) -> None:
        for pages, length in self.requests:
            for page in pages[: length // PAGE]:
                for layer in range(LAYERS):
                    for host, dense in zip(self.slots.host[layer], self.dense, strict=True):
                        assert torch.equal(host[page], dense[layer][page * PAGE : (page + 1) * PAGE])


TestTieredPool = TieredPool.TestCase
TestTieredPool.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


@given(st.lists(st.lists(st.integers(1, 2 * PAGE), min_size=FRAMES, max_size=FRAMES), min_size=1, max_size=5))
def test_a_step_is_planned_without_a_wait_as_a_pass_is(lengths: list[list[int]]) -> None:
    """Requests of such lengths, each with one more token; some start anew where a step before left them."""
    waiting, asynchronous = (OpenPages(FRAMES, PAGES, PAGE, "cpu") for _ in range(2))
    completed = torch.zeros(0, dtype=torch.int64)
    for step in lengths:
        at = [
            (1 + 3 * row + (length - 1) // PAGE) * PAGE + (length - 1) % PAGE
            for row, length in enumerate(step)
        ]
        if len(waiting.open()[0]) and not set(waiting.open()[0].tolist()) <= {each // PAGE for each in at}:
            for table in (waiting, asynchronous):
                table.clear()
        locations = torch.tensor([*at, 0])
        plan = waiting.plan(locations)
        done = asynchronous.close_completed()
        if done is not None:
            assert torch.equal(done[0], completed)  # none was freed
        completed = plan.completed
        step_plan = asynchronous.plan_step(
            locations, [row for row, each in enumerate(at) if each % PAGE == PAGE - 1]
        )
        asynchronous.check_integrity()
        assert torch.equal(waiting.frame_of, asynchronous.frame_of)
        assert torch.equal(waiting.page_in, asynchronous.page_in)
        reopened = step_plan.pages[step_plan.is_reopened]
        assert torch.equal(reopened, plan.reopened)
        assert torch.equal(step_plan.frames[:-1] * PAGE + step_plan.offsets[:-1], plan.frame_locations)
        assert step_plan.pages.tolist()[-1] == step_plan.frames.tolist()[-1] == -1


def test_more_open_pages_than_frames_are_refused() -> None:
    frames = OpenPages(2, PAGES, PAGE, "cpu")
    with pytest.raises(AssertionError, match="3 more open pages, 2 of 2 frames free"):
        frames.plan(torch.tensor([1, 2, 3]) * PAGE)


def test_tokens_of_a_page_must_be_consecutive() -> None:
    frames = OpenPages(2, PAGES, PAGE, "cpu")
    with pytest.raises(AssertionError, match="not consecutive"):
        frames.plan(torch.tensor([PAGE + 3, PAGE]))


@pytest.mark.parametrize("padding", [1, PAGE, 3 * PAGE])
def test_padding_is_written_nowhere_however_much_there_is(padding: int) -> None:
    """A dummy batch of upstream's, before the first request, is all padding."""
    frames = OpenPages(1, PAGES, PAGE, "cpu")
    for locations in ([], [PAGE]):
        plan = frames.plan(torch.tensor([*locations, *[0] * padding]))
        assert plan.frame_locations.tolist() == [0] * len(locations)
        assert len(plan.to_host) == len(plan.whole) == 0


def test_a_page_that_comes_whole_takes_no_frame() -> None:
    frames = OpenPages(1, PAGES, PAGE, "cpu")
    plan = frames.plan(torch.arange(PAGE, 3 * PAGE))
    assert len(plan.to_host) == 2 * PAGE
    assert len(plan.to_frames) == len(frames.open()[0]) == 0


def test_what_somebody_else_wrote_on_the_host_is_represented_anew() -> None:
    host = [torch.zeros(PAGES * PAGE, HEADS, dim) for dim in (KEY_DIM, VALUE_DIM)]
    slots = PageSlots(
        *([tensor] for tensor in host),
        num_frames=1,
        num_slots=3,
        page_size=PAGE,
        staging_pages=3,
        device="cpu",
        selector=AllKeys(PAGE),
    )
    assert slots.representations is not None
    pages = torch.tensor([4, 5])
    slots.representations.of(0, pages)
    host[0][5 * PAGE :].normal_()
    with pytest.raises(AssertionError, match="of other keys"):
        slots.check_integrity()
    slots.forget(pages)
    slots.representations.of(0, pages)
    slots.check_integrity()
