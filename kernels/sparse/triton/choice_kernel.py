"""The pages that rows of a step read, out of the estimates of a scan: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_importance_kernels.sparse.page_choice import MOST_PAGES, ChoiceRule, Contexts
from sgl_importance_kernels.sparse.triton.estimates import Estimates
from sgl_importance_kernels.triton.tiles import log_sum

WARPS = 8
ESTIMATES_AT_A_TIME = 8192
"""Of all heads: of so many pages as a program holds beside the context."""
_FORCED = 0x7FFFFFFF  # above the key of every share
_LARGEST_KEY = 0x7F800000  # of a share of 1


@triton.jit(do_not_specialize=["max_pages", "num_tiles", "most_chosen", "num_sinks", "window_tokens"])
def _choice_kernel(
    Logits,
    Largest,
    Sums,
    Pages,
    NumTokens,
    MaxPages,
    LogShares,
    Chosen,
    Shares,
    max_pages,
    num_tiles,
    most_chosen,
    num_sinks,
    window_tokens,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
    FORCED: tl.constexpr,
    LARGEST_KEY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    is_head = head < HEADS
    of_heads = row * HEADS + head

    # What all of a head's estimates sum to, out of those of tiles.
    sums = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    for first in range(0, num_tiles, BLOCK_PAGES):
        tile = first + tl.arange(0, BLOCK_PAGES)
        at = of_heads[:, None] * num_tiles + tile[None, :]
        is_tile = is_head[:, None] & (tile < num_tiles)[None, :]
        largest = tl.load(Largest + at, mask=is_tile, other=float("-inf"))
        parts = largest + tl.log(tl.load(Sums + at, mask=is_tile, other=0.0))
        both = tl.join(sums, log_sum(parts, axis=1))
        sums = log_sum(both, axis=1)

    num_tokens = tl.load(NumTokens + row)
    num_before = (num_tokens - 1) // PAGE_SIZE
    for first in range(0, num_before.to(tl.int32), BLOCK_PAGES):
        page = first + tl.arange(0, BLOCK_PAGES)
        is_page = page < num_before
        logits = tl.load(
            Logits + of_heads[:, None] * max_pages + page[None, :],
            mask=is_head[:, None] & is_page[None, :],
            other=float("-inf"),
        )
        shares = tl.where(is_head[:, None], logits - sums[:, None], float("-inf"))
        tl.store(LogShares + row * max_pages + page, tl.max(shares, axis=0), mask=is_page)
    tl.debug_barrier()  # other threads read what these wrote

    first_recent = tl.maximum(num_tokens - window_tokens, 0) // PAGE_SIZE
    at = tl.arange(0, BLOCK_ALL)
    is_before = at < num_before
    is_forced = is_before & ((at < num_sinks) | (at >= first_recent))
    num_forced = tl.sum(is_forced.to(tl.int64))
    count = tl.maximum(tl.load(MaxPages + row) - 1, num_forced)
    share = tl.load(LogShares + row * max_pages + at, mask=at < max_pages, other=float("-inf"))
    # Logs of shares are 0 at most: without the sign, their bits fall as they grow.
    key = LARGEST_KEY - tl.maximum(-share, 0.0).to(tl.int32, bitcast=True)
    key = tl.where(is_before, tl.where(is_forced, FORCED, key), -1)

    # The largest number that so many keys reach, bit by bit.
    threshold = count.to(tl.int32) * 0
    for bit in range(31):
        candidate = threshold | (1 << (30 - bit))
        reaching = tl.sum((key >= candidate).to(tl.int32))
        threshold = tl.where(reaching >= count, candidate, threshold)
    is_above = key > threshold
    is_equal = (key == threshold) & (key > 0)
    left = count - tl.sum(is_above.to(tl.int32))
    is_chosen = is_above | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= left))
    column = tl.cumsum(is_chosen.to(tl.int32), 0)  # column 0 is the last page's
    found = tl.sum(is_chosen.to(tl.int32))

    width = most_chosen + 1
    pages = tl.load(Pages + row * max_pages + at, mask=is_chosen, other=-1)
    tl.store(Chosen + row * width + column, pages, mask=is_chosen)
    # Loaded again: held from above, it would not fit the registers of a long context.
    share = tl.load(LogShares + row * max_pages + at, mask=is_chosen, other=0.0)
    tl.store(Shares + row * width + column, tl.exp(share), mask=is_chosen)
    behind = tl.arange(0, BLOCK_CHOSEN)
    is_behind = (behind > found) & (behind < width)
    tl.store(Chosen + row * width + behind, tl.full((BLOCK_CHOSEN,), -1, tl.int64), mask=is_behind)
    tl.store(Shares + row * width + behind, tl.zeros((BLOCK_CHOSEN,), tl.float32), mask=is_behind)
    tl.store(Chosen + row * width, tl.load(Pages + row * max_pages + num_before))
    tl.store(Shares + row * width, 0.0)


def pages_at_a_time(block_h: int) -> int:
    """Pages whose estimates are read together, by ``BLOCK_H`` of the kernel."""
    return min(256, ESTIMATES_AT_A_TIME // block_h)


def can_choose(contexts: Contexts) -> bool:
    """Whether the kernel holds the contexts."""
    return contexts.pages.shape[1] <= MOST_PAGES


def choose(estimates: Estimates, contexts: Contexts, rule: ChoiceRule) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``choose_pages``, but with the context's last page in front; of equals the first are chosen.

    Args:
        estimates: of a scan of the contexts' pages before the last.
        contexts: of the rows, for which ``can_choose`` holds.
        rule: what holds for every choice.

    Returns:
        Pages, int64 [rows, 1 + most chosen]: the context's last, then those before it in their order, -1
        behind them; and their shares, float32, 0 where there is no estimate.
    """
    num_rows, heads, most = estimates.logits.shape
    width = contexts.most_chosen + 1
    device = estimates.logits.device
    assert contexts.pages.is_contiguous()
    block_h = max(2, triton.next_power_of_2(heads))
    log_shares = torch.empty(num_rows, most, dtype=torch.float32, device=device)
    chosen = torch.empty(num_rows, width, dtype=torch.int64, device=device)
    shares = torch.empty(num_rows, width, dtype=torch.float32, device=device)
    _choice_kernel[(num_rows,)](
        *estimates,
        contexts.pages,
        contexts.num_tokens,
        contexts.max_pages,
        log_shares,
        chosen,
        shares,
        most,
        estimates.sums.shape[2],
        contexts.most_chosen,
        rule.num_sinks(contexts.page_size),
        rule.window_tokens,
        HEADS=heads,
        BLOCK_H=block_h,
        PAGE_SIZE=contexts.page_size,
        BLOCK_PAGES=pages_at_a_time(block_h),
        BLOCK_ALL=triton.next_power_of_2(most),
        BLOCK_CHOSEN=triton.next_power_of_2(width),
        FORCED=_FORCED,
        LARGEST_KEY=_LARGEST_KEY,
        num_warps=WARPS,
    )
    return chosen, shares
