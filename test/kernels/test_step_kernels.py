"""Kernels that choose a step's pages and give them slots, against plain references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_importance_kernels.sparse.late_counts import LateCounts
from sgl_importance_kernels.sparse.page_choice import ChoiceRule, Contexts, choose_pages
from sgl_importance_kernels.sparse.page_history import PageHistory
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
        before = (length - 1) // PAGE
        logits[row, :, :before] = 5 * torch.randn(heads, before, generator=draws)
    contexts = Contexts.of(pages.to(device), lengths, [budget] * len(lengths), RULE, PAGE)
    tiles = torch.nn.functional.pad(logits, (0, -most % tile), value=-torch.inf).unflatten(2, (-1, tile))
    largest = tiles.amax(dim=3)
    sums = (tiles - largest.clamp(min=-1e30)[..., None]).exp().sum(dim=3)
    assert can_choose(contexts)
    estimates = Estimates(*(part.contiguous().to(device) for part in (logits, largest, sums)))
    chosen, shares = choose(estimates, contexts, RULE)
    expected, expected_shares = choose_pages(logits.to(device), contexts, RULE)
    assert torch.equal(chosen[:, 0], contexts.last_page)
    assert torch.equal(chosen[:, 1:], expected)
    torch.testing.assert_close(shares[:, 1:], expected_shares)
    assert not bool(shares[:, 0].any())


def test_of_equal_pages_the_first_are_read(device: str) -> None:
    contexts = Contexts.of(torch.arange(1, 13, device=device)[None], [12 * PAGE], [6], RULE, PAGE)
    logits = torch.zeros(1, 2, 12, device=device)
    logits[..., -1] = -torch.inf
    estimates = Estimates(
        logits, torch.zeros(1, 2, 1, device=device), torch.full((1, 2, 1), 11.0, device=device)
    )
    chosen, _ = choose(estimates, contexts, RULE)
    assert chosen.tolist() == [[12, 1, 2, 3, 4, 11]]


class PlainTable:
    """The rule, written plainly: what lies in the slots of one layer."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}  # page by slot
        self.last: dict[int, int] = {}
        self.now = 0

    def level(self, page: int) -> float:
        """What a page is worth by its age, rounded down to an eighth of an octave."""
        age = torch.tensor(self.now - self.last.get(page, -2), dtype=torch.float32)
        mantissa, exponent = (float(part) for part in torch.frexp(age))
        return -exponent - int(mantissa * 16) / 16

    def begin_pass(self) -> None:
        self.now += 1
        slots = range(FRAMES, SLOTS)
        free = [slot for slot in slots if slot not in self.held]
        taken = sorted((slot for slot in slots if slot in self.held), key=lambda s: self.level(self.held[s]))
        self.order = [(slot, self.held.get(slot)) for slot in (*free, *taken)]

    def read(self, pages: list[int], *, is_chosen: bool) -> set[int]:
        """The pages that are brought; what they cannot push out stays."""
        for page in set(pages):
            self.last[page] = self.now
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
    reads=st.lists(st.tuples(request, st.booleans(), st.booleans()), min_size=1, max_size=10),
)
def test_slots_are_given_as_a_plain_reference_gives_them(
    reads: list[tuple[list[int], bool, bool]], device: str
) -> None:
    table = SlotTable(PageHistory(1, PAGES, device), 1, PAGES, SLOTS, FRAMES, device)
    late = LateCounts(2, device)
    on_device = DeviceTable(table, torch.full((PAGES,), -1, device=device), late.sums)
    plain = PlainTable()
    read = loaded = 0
    for pages, is_chosen, begins in reads:
        if begins or not table.now:
            table.begin_pass()
            on_device.begin_pass()
            plain.begin_pass()
        resident = set(plain.held.values())
        expected = plain.read(pages, is_chosen=is_chosen)
        numbers = torch.tensor([*pages, -1], device=device)
        places, brought, given_slots, count = on_device.place(0, numbers, is_chosen=is_chosen)
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
    table = SlotTable(PageHistory(1, PAGES, device), 1, PAGES, SLOTS, FRAMES, device)
    frame_of = torch.full((PAGES,), -1, device=device)
    frame_of[3] = 1
    on_device = DeviceTable(table, frame_of, torch.zeros(2, dtype=torch.int64, device=device))
    table.begin_pass()
    on_device.begin_pass()
    places, _, _, count = on_device.place(0, torch.tensor([3, 0, 4, -1, 4], device=device), is_chosen=False)
    slot = int(table.slot_of[0, 4])
    assert places.tolist() == [1, SLOTS, slot, -1, slot]
    assert int(count) == 1
    table.check_integrity()


def test_choices_fade_as_in_the_history(device: str) -> None:
    """What the live page shows: the same by the kernel and by torch."""
    plain = PageHistory(1, PAGES, "cpu")
    table = SlotTable(PageHistory(1, PAGES, device), 1, PAGES, SLOTS, FRAMES, device)
    on_device = DeviceTable(
        table, torch.full((PAGES,), -1, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    )
    for pages, is_chosen in (([3, 4, 3], True), ([3, -1, 5], True), ([4, 6], False), ([5, 5], True)):
        table.begin_pass()
        on_device.begin_pass()
        on_device.place(0, torch.tensor(pages, device=device), is_chosen=is_chosen)
        plain.read(0, torch.tensor(pages), table.now, is_chosen=is_chosen)
    everything = torch.arange(1, PAGES)
    found = table.choices(everything.to(device)).cpu()
    torch.testing.assert_close(found, plain.choices(everything, table.now))
    assert found[0, 2] > found[0, 3] > 0  # page 3, then 4, which was chosen once
