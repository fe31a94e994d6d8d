"""Slots of a layer given to pages in one launch, and the order in which slots are given, once a pass.

What ``SlotTable.read`` decides by sorting all slots of a layer is decided by counting here (SPIN): slots have
one of 256 levels of worth, an eighth of an octave each, and among those of a level none goes before another.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sgl_importance_kernels.sparse.page_history import DECAY

LEVELS = 256
WARPS = 16
BLOCK = 1024


@triton.jit
def _level_of_slots(Held, LastRead, now, slot, is_slot):
    """Level of each slot, 0 of free ones; and its page."""
    page = tl.load(Held + slot, mask=is_slot, other=-1)
    is_held = is_slot & (page >= 0)
    age = (now - tl.load(LastRead + page, mask=is_held, other=0)).to(tl.float32)
    bits = age.to(tl.int32, bitcast=True)
    # The exponent and three bits behind: eighths of an octave.
    level = 254 - tl.minimum(tl.maximum((bits >> 20) - (127 << 3), 0), 253)
    return tl.where(is_held, level, 0), page


@triton.jit(do_not_specialize=["num_pages", "num_slots", "first_slot"])
def _count_kernel(
    PageIn,
    LastRead,
    Now,
    Counts,
    num_pages,
    num_slots,
    first_slot,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer = tl.program_id(1).to(tl.int64)
    slot = first_slot + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_slot = slot < num_slots
    level, _ = _level_of_slots(
        PageIn + layer * num_slots,
        LastRead + layer * num_pages,
        tl.load(Now),
        slot,
        is_slot,
    )
    tl.atomic_add(Counts + layer * 2 * LEVELS + level, tl.full((BLOCK,), 1, tl.int32), mask=is_slot)


@triton.jit(do_not_specialize=["num_pages", "num_slots", "first_slot"])
def _order_kernel(
    PageIn,
    LastRead,
    Now,
    Counts,
    Order,
    num_pages,
    num_slots,
    first_slot,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer = tl.program_id(1).to(tl.int64)
    slot = first_slot + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_slot = slot < num_slots
    level, page = _level_of_slots(
        PageIn + layer * num_slots,
        LastRead + layer * num_pages,
        tl.load(Now),
        slot,
        is_slot,
    )
    counts = tl.load(Counts + layer * 2 * LEVELS + tl.arange(0, LEVELS))
    before = tl.gather(tl.cumsum(counts, 0) - counts, level, 0)
    taken = Counts + (layer * 2 + 1) * LEVELS + level
    at = before + tl.atomic_add(taken, tl.full((BLOCK,), 1, tl.int32), mask=is_slot)
    out = Order + (layer * (num_slots - first_slot) + at) * 2
    tl.store(out, slot.to(tl.int32), mask=is_slot)
    tl.store(out + 1, page, mask=is_slot)


# Tables of layers begin anywhere: a kernel for each of their alignments would be compiled while it serves.
@triton.jit(
    do_not_specialize=["num_entries", "num_slots", "num_ordered", "bound_behind"],
    do_not_specialize_on_alignment=["SlotOf", "PageIn", "LastRead", "Choices", "Order", "Pages"],
)
def _place_kernel(
    Pages,
    FrameOf,
    SlotOf,
    PageIn,
    LastRead,
    Choices,
    Now,
    Order,
    Places,
    Brought,
    Given,
    Count,
    Totals,
    num_entries,
    num_slots,
    num_ordered,
    bound_behind,
    IS_CHOSEN: tl.constexpr,
    LOG_DECAY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    now = tl.load(Now)

    # Reads, each page's past fading once; pages that lack a slot, whoever claims one first, in a list.
    wanted = 0
    for first in range(0, num_entries, BLOCK):
        entry = first + lane
        page = tl.load(Pages + entry, mask=entry < num_entries, other=-1)
        is_page = page >= 0
        last = tl.atomic_xchg(LastRead + page, now + tl.zeros((BLOCK,), tl.int32), mask=is_page)
        is_first = is_page & (last != now)
        fading = tl.exp2((now - last).to(tl.float32) * LOG_DECAY)
        choices = tl.load(Choices + page, mask=is_first, other=0.0)
        tl.store(Choices + page, choices * fading, mask=is_first)
        frame = tl.load(FrameOf + page, mask=is_page, other=-1)
        may_lack = is_page & (page > 0) & (frame < 0)
        none = tl.full((BLOCK,), -1, tl.int32)
        # Pages that have a slot need no claim: an exchange of -1 for -2 leaves them as they are.
        old = tl.atomic_cas(
            SlotOf + tl.where(may_lack, page, 0), tl.where(may_lack, none, 0x7FFFFFFF), none - 1
        )
        is_claimed = may_lack & (old == -1)
        at = wanted + tl.cumsum(is_claimed.to(tl.int32), 0) - 1
        tl.store(Brought + at, page.to(tl.int32), mask=is_claimed)
        wanted += tl.sum(is_claimed.to(tl.int32))
    tl.debug_barrier()

    if IS_CHOSEN:
        for first in range(0, num_entries, BLOCK):
            entry = first + lane
            page = tl.load(Pages + entry, mask=entry < num_entries, other=-1)
            tl.atomic_add(Choices + page, tl.full((BLOCK,), 1.0, tl.float32), mask=page >= 0)

    # Slots in the pass's order; those whose page was read since stay, and those that another page has by now.
    given = 0
    start = 0
    bound = now - bound_behind
    while (given < wanted) & (start < num_ordered):
        at = start + lane
        is_ordered = at < num_ordered
        slot = tl.load(Order + 2 * at, mask=is_ordered, other=0)
        left = tl.load(Order + 2 * at + 1, mask=is_ordered, other=-1)
        held = tl.load(PageIn + slot, mask=is_ordered, other=-2)
        last = tl.load(LastRead + left, mask=is_ordered & (left >= 0), other=-2)
        may_go = is_ordered & (held == left) & ((left < 0) | (last < bound))
        rank = given + tl.cumsum(may_go.to(tl.int32), 0) - 1
        goes = may_go & (rank < wanted)
        page = tl.load(Brought + rank, mask=goes, other=0)
        tl.store(SlotOf + left, tl.full((BLOCK,), -1, tl.int32), mask=goes & (left >= 0))
        tl.store(SlotOf + page, slot, mask=goes)
        tl.store(PageIn + slot, page, mask=goes)
        tl.store(Given + rank, slot, mask=goes)
        given = tl.minimum(given + tl.sum(may_go.to(tl.int32)), wanted)
        start += BLOCK
    # Claims that found no slot are given back.
    for first in range(given, wanted, BLOCK):
        at = first + lane
        page = tl.load(Brought + at, mask=at < wanted, other=0)
        tl.store(SlotOf + page, tl.full((BLOCK,), -1, tl.int32), mask=at < wanted)
    tl.debug_barrier()

    read = 0
    staying = 0
    for first in range(0, num_entries, BLOCK):
        entry = first + lane
        page = tl.load(Pages + entry, mask=entry < num_entries, other=-1)
        is_page = page >= 0
        frame = tl.load(FrameOf + page, mask=is_page, other=-1)
        slot = tl.load(SlotOf + page, mask=is_page & (page > 0), other=-1).to(tl.int64)
        place = tl.where(frame >= 0, tl.where(page > 0, frame, -1), slot)
        stays = is_page & (place < 0)
        place = tl.where(stays, page + num_slots, place)
        tl.store(Places + entry, tl.where(is_page, place, -1), mask=entry < num_entries)
        read += tl.sum(is_page.to(tl.int32))
        staying += tl.sum(stays.to(tl.int32))
    tl.store(Count, given.to(tl.int64))
    tl.store(Totals, tl.load(Totals) + read)
    tl.store(Totals + 1, tl.load(Totals + 1) + given + staying)


def order_slots(
    page_in: torch.Tensor,
    last_read: torch.Tensor,
    now: torch.Tensor,
    counts: torch.Tensor,
    order: torch.Tensor,
    *,
    first_slot: int,
) -> None:
    """Puts the slots of all layers in the order in which they are given: free ones, then by worth.

    Args:
        page_in: of each slot, int32 [layers, slots]; -1 for none.
        last_read: of each page, int32 [layers, pages].
        now: number of the pass, int32 [1].
        counts: room, int32 [layers, 2, LEVELS].
        order: results, int32 [layers, slots - first_slot, 2]: slots and what they hold.
        first_slot: those before it are not given.
    """
    layers, num_slots = page_in.shape
    if num_slots == first_slot:
        return
    counts.zero_()
    grid = (triton.cdiv(num_slots - first_slot, BLOCK), layers)
    sizes = (last_read.shape[1], num_slots, first_slot)
    how = {"LEVELS": LEVELS, "BLOCK": BLOCK}
    _count_kernel[grid](page_in, last_read, now, counts, *sizes, **how)
    _order_kernel[grid](page_in, last_read, now, counts, order, *sizes, **how)


def place_pages(
    pages: torch.Tensor,
    frame_of: torch.Tensor,
    slot_of: torch.Tensor,
    page_in: torch.Tensor,
    last_read: torch.Tensor,
    choices: torch.Tensor,
    now: torch.Tensor,
    order: torch.Tensor,
    count: torch.Tensor,
    totals: torch.Tensor,
    *,
    is_chosen: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reads pages in one layer, and gives slots to those that have none, in one launch; asynchronous.

    Args:
        pages: int64 of any shape, contiguous; -1 for none, and one that several read, several times.
        frame_of: slot of each page that is being filled, int64 [pages]; -1 of the others.
        slot_of: of each page in this layer, int32 [pages]; likewise.
        page_in, last_read, order: those of the layer, as in ``order_slots``.
        choices: of each page when it was last read, float32 [pages].
        now: as there.
        count: result, int64 [1]: how many pages are brought.
        totals: pages that were read, and that came from the host, int64 [2]; these are added.
        is_chosen: whether a selector chose them.

    Returns:
        Places as ``PageSlots.place`` returns them; pages to be brought and slots that they go to, int32, of
        which the first ``count`` mean something.
    """
    assert pages.is_contiguous()
    device = pages.device
    places = torch.empty_like(pages)
    brought, given = (torch.empty(pages.numel(), dtype=torch.int32, device=device) for _ in range(2))
    _place_kernel[(1,)](
        pages,
        frame_of,
        slot_of,
        page_in,
        last_read,
        choices,
        now,
        order,
        places,
        brought,
        given,
        count,
        totals,
        pages.numel(),
        len(page_in),
        len(order),
        0 if is_chosen else 1,
        IS_CHOSEN=is_chosen,
        LOG_DECAY=math.log2(DECAY),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return places, brought, given
