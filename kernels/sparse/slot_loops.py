"""Who is in which slot, and who leaves: loops of ``SlotTable`` and ``PageHistory``, compiled for CPUs.

Each layer of a step asks, and as tensor operations they take longer than attention to the chosen pages.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_importance_kernels.jit import njit

Numbers = npt.NDArray[np.int64]
Entries = npt.NDArray[np.int32]


@njit("void(int64[::1], int64, boolean, float32, float32[::1], int32[::1])", nogil=True)
def note_reads(
    pages: Numbers, now: int, is_chosen: bool, decay: float, choices: npt.NDArray[np.float32], last: Entries
) -> None:
    """Pages of one layer are read in pass ``now``.

    Args:
        pages: -1 for none; one that several requests read stands there several times.
        now: the pass.
        is_chosen: whether a selector chose them.
        decay: what is left of a choice after a pass.
        choices: of all pages as of their last reads; updated.
        last: passes of last reads of all pages; updated.
    """
    for page in pages:
        if page < 0:
            continue
        age = now - last[page]
        if age > 0:
            choices[page] *= decay ** np.float32(age)
            last[page] = now
        if is_chosen:
            choices[page] += 1


@njit("int64(int64[::1], int64[::1], int32[::1], int64[::1], int64[::1])", nogil=True)
def find_slots(pages: Numbers, elsewhere: Numbers, slot_of: Entries, slots: Numbers, missing: Numbers) -> int:
    """Where pages of one layer are.

    Args:
        pages: those asked for; -1 for none, and 0 is padding's.
        elsewhere: where they are without a slot of the table, -1 of the others.
        slot_of: of all pages.
        slots: result for each page, -1 of those without one.
        missing: result, the pages that are nowhere, each once and in order, in the first places.

    Returns:
        How many are missing.
    """
    count = 0
    for at in range(len(pages)):
        page = pages[at]
        slots[at] = -1
        if page > 0:
            slots[at] = elsewhere[at] if elsewhere[at] >= 0 else slot_of[page]
            if slots[at] < 0:
                missing[count] = page
                count += 1
    missing[:count].sort()
    different = 0
    for at in range(count):
        if different == 0 or missing[at] != missing[different - 1]:
            missing[different] = missing[at]
            different += 1
    return different


@njit("int64(int64[::1], int64, float64[::1], boolean[::1], int32[::1], int32[::1], int64[::1])", nogil=True)
def give_slots(
    missing: Numbers,
    first_slot: int,
    worth: npt.NDArray[np.float64],
    stays: npt.NDArray[np.bool_],
    page_in: Entries,
    slot_of: Entries,
    slots: Numbers,
) -> int:
    """Gives pages of one layer slots in their order: free ones, then those of pages that are worth least.

    Args:
        missing: pages without a slot, each once.
        first_slot: the first that may be given.
        worth: of what is in each slot from the first on; of equals the first slot goes first.
        stays: whether what is in it stays, likewise.
        page_in: of each slot, -1 of the free ones; updated.
        slot_of: of all pages; updated.
        slots: result, those of the pages that got one, in the first places.

    Returns:
        How many pages got one.
    """
    wanted, given = len(missing), 0
    for slot in range(first_slot, len(page_in)):
        if given < wanted and page_in[slot] < 0:
            slots[given] = slot
            given += 1
    if given < wanted:
        leaving = np.flatnonzero((page_in[first_slot:] >= 0) & ~stays)
        for at in leaving[np.argsort(worth[leaving], kind="mergesort")[: wanted - given]]:
            slots[given] = first_slot + at
            given += 1
    for at in range(given):
        left = page_in[slots[at]]
        if left >= 0:
            slot_of[left] = -1
        page_in[slots[at]] = missing[at]
        slot_of[missing[at]] = slots[at]
    return given
