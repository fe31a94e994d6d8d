"""Kernels that choose a step's pages and give them slots, against plain references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_importance_kernels.sparse.late_counts import LateCounts
from sgl_importance_kernels.sparse.page_choice import ChoiceRule, Contexts, choose_pages
from sgl_importance_kernels.sparse.page_history import PageHistory, Residency
from sgl_importance_kernels.sparse.slot_table import SlotTable
from sgl_importance_kernels.sparse.triton.choice_kernel import can_choose, choose
from sgl_importance_kernels.sparse.triton.device_table import DeviceTable
from sgl_importance_kernels.sparse.triton.estimates import Estimates

pytestmark = pytest.mark.triton

PAGE, PAGES, SLOTS, FRAMES = 4, 20, 9, 2
RULE = ChoiceRule(sink_tokens=PAGE, window_tokens=2 * PAGE)
few = settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)


@few
@given(
    lengths=st.lists(st.integers(6 * PAGE, 21 * PAGE), min_size=1, max_size=3),
    budget=st.integers(1, 5),
    heads=st.sampled_from((1, 3, 4)),
    tile=st.sampled_from((4, 16)),
    seed=st.integers(0, 999),
)
def test_a_row_reads_what_the_definition_reads(
    lengths: list[int], budget: int, heads: int, tile: int, seed: int, device: str
) -> None:
    draws = torch.Generator().manual_seed(seed)
    counts = [-(-length // PAGE) for length in lengths]
    most = max(counts)
    pages = torch.zeros(len(lengths), most, dtype=torch.int64)
    logits = torch.full((len(lengths), heads, most), -torch.inf)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages[row, :count] = 1 + torch.randperm(100, generator=draws)[:count]
        complete = length // PAGE
        logits[row, :, :complete] = 5 * torch.randn(heads, complete, generator=draws)
    contexts = Contexts.of(pages.to(device), lengths, [budget] * len(lengths), RULE, PAGE)
    tiles = torch.nn.functional.pad(logits, (0, -most % tile), value=-torch.inf).unflatten(2, (-1, tile))
    largest = tiles.amax(dim=3)
    sums = (tiles - largest.clamp(min=-1e30)[..., None]).exp().sum(dim=3)
    assert can_choose(RULE, contexts)
    estimates = Estimates(*(part.contiguous().to(device) for part in (logits, largest, sums)))
    chosen, shares = choose(estimates, contexts, RULE)
    expected, expected_shares = choose_pages(logits.to(device), contexts, RULE)
    assert torch.equal(chosen[:, 0], contexts.partial_page)
    assert torch.equal(chosen[:, 1:], expected)
    torch.testing.assert_close(shares[:, 1:], expected_shares)
    assert not bool(shares[:, 0].any())


def test_of_equal_pages_the_first_are_read(device: str) -> None:
    contexts = Contexts.of(torch.arange(1, 13, device=device)[None], [12 * PAGE], [6], RULE, PAGE)
    logits = torch.zeros(1, 2, 12, device=device)
    estimates = Estimates(
        logits, torch.zeros(1, 2, 1, device=device), torch.full((1, 2, 1), 12.0, device=device)
    )
    chosen, _ = choose(estimates, contexts, RULE)
    assert chosen.tolist() == [[-1, 1, 2, 3, 4, 11, 12]]


class PlainTable:
    """The rule, written plainly: what lies in the slots of one layer."""

    def __init__(self, policy: str) -> None:
        self.held: dict[int, int] = {}  # page by slot
        self.last: dict[int, int] = {}
        self.choices: dict[int, float] = {}
        self.now = 0
        self.policy = policy

    def level(self, page: int) -> float:
        """What a page is worth, rounded down to an eighth of an octave, or to an octave."""
        age = self.now - self.last.get(page, -2)
        worth = float(age)
        if self.policy in ("ema", "importance"):
            worth = self.choices.get(page, 0.0) * 0.95**age
            if worth < 2**-20:
                return -100.0
        mantissa, exponent = (float(part) for part in torch.frexp(torch.tensor(worth, dtype=torch.float32)))
        rounded = exponent if self.policy == "bucketed_lru" else exponent + int(mantissa * 16) / 16
        return rounded if self.policy in ("ema", "importance") else -rounded

    def begin_pass(self) -> None:
        self.now += 1
        slots = range(FRAMES, SLOTS)
        free = [slot for slot in slots if slot not in self.held]
        taken = sorted((slot for slot in slots if slot in self.held), key=lambda s: self.level(self.held[s]))
        self.order = [(slot, self.held.get(slot)) for slot in (*free, *taken)]

    def read(self, pages: list[int], *, is_chosen: bool) -> set[int]:
        """The pages that are brought; what they cannot push out stays."""
        for page in set(pages):
            age = self.now - self.last.get(page, -2)
            self.choices[page] = self.choices.get(page, 0.0) * 0.95**age
            self.last[page] = self.now
        for page in pages if is_chosen else ():
            self.choices[page] += 0.25 if self.policy == "importance" else 1.0
        missing = list(dict.fromkeys(page for page in pages if page not in self.held.values()))
        bound = self.now if is_chosen else self.now - 1
        going = [
            (slot, page)
            for slot, page in self.order
            if self.held.get(slot) == page and (page is None or self.last[page] < bound)
        ]
        for page, (slot, _) in zip(missing, going, strict=False):
            self.held[slot] = page
        return set(missing[: len(going)])


request = st.lists(st.integers(1, PAGES - 1), min_size=1, max_size=6)


@few
@given(
    policy=st.sampled_from(("lru", "bucketed_lru", "ema", "importance")),
    reads=st.lists(st.tuples(request, st.booleans(), st.booleans()), min_size=1, max_size=10),
)
def test_slots_are_given_as_a_plain_reference_gives_them(
    policy: Residency, reads: list[tuple[list[int], bool, bool]], device: str
) -> None:
    table = SlotTable(PageHistory(policy, 1, PAGES, device), 1, PAGES, SLOTS, FRAMES, device)
    late = LateCounts(2, device)
    on_device = DeviceTable(table, torch.full((PAGES,), -1, device=device), late.sums)
    plain = PlainTable(policy)
    read = loaded = 0
    for pages, is_chosen, begins in reads:
        if begins or not table.now:
            table.begin_pass()
            on_device.begin_pass()
            plain.begin_pass()
        resident = set(plain.held.values())
        expected = plain.read(pages, is_chosen=is_chosen)
        numbers = torch.tensor([*pages, -1], device=device)
        shares = torch.full((len(numbers),), 0.25, device=device) if is_chosen else None
        places, brought, given_slots, count = on_device.place(0, numbers, shares)
        table.check_integrity()
        loads = dict(zip(brought.tolist()[: int(count)], given_slots.tolist()[: int(count)], strict=True))
        held = {int(page) for page in table.page_in[0] if page >= 0}
        assert len(loads) == len(expected)
        # On a GPU any of the pages that lack a slot may get it, where there are too few.
        if device == "cpu" or len(expected) == len(set(pages) - resident):
            assert loads.keys() == expected
            assert held == set(plain.held.values())
        for page, place in zip(pages, places.tolist(), strict=False):
            slot = int(table.slot_of[0, page])
            assert place == (slot if slot >= 0 else SLOTS + page)
            assert loads.get(page, slot) == slot
        assert places.tolist()[-1] == -1
        read += len(pages)
        loaded += len(loads) + sum(place >= SLOTS for place in places.tolist())
        assert late.sums.tolist() == [read, loaded]


def test_pages_in_frames_and_padding_get_no_slot(device: str) -> None:
    table = SlotTable(PageHistory("ema", 1, PAGES, device), 1, PAGES, SLOTS, FRAMES, device)
    frame_of = torch.full((PAGES,), -1, device=device)
    frame_of[3] = 1
    on_device = DeviceTable(table, frame_of, torch.zeros(2, dtype=torch.int64, device=device))
    table.begin_pass()
    on_device.begin_pass()
    places, _, _, count = on_device.place(0, torch.tensor([3, 0, 4, -1, 4], device=device), None)
    slot = int(table.slot_of[0, 4])
    assert places.tolist() == [1, SLOTS, slot, -1, slot]
    assert int(count) == 1
    table.check_integrity()


def test_a_page_that_was_chosen_for_nothing_that_is_a_number_may_leave(device: str) -> None:
    table = SlotTable(PageHistory("importance", 1, PAGES, device), 1, PAGES, SLOTS, FRAMES, device)
    on_device = DeviceTable(
        table, torch.full((PAGES,), -1, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    )
    table.begin_pass()
    on_device.begin_pass()
    on_device.place(0, torch.tensor([3, 4], device=device), torch.tensor([torch.nan, 0.5], device=device))
    assert table.choices(torch.tensor([3, 4], device=device))[0].tolist() == [0.0, 0.5]
