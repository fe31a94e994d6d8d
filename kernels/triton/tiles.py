"""Functions that the kernels share: soft cap, log-sums over the last axis, the pages of the body."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MIN_DOT_ROWS = 16
"""tl.dot's smallest tile."""


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """What numbers of a type are multiplied in."""
    if dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        return tl.float32  # The interpreter of Triton 3.9 multiplies the bit patterns of bfloat16.
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


@triton.jit
def soft_capped(logits, LOGIT_CAP: tl.constexpr):
    """``cap * tanh(logits / cap)``; the exponential is of a negative number, so it cannot overflow."""
    shrink = tl.exp(-2.0 * tl.abs(logits) / LOGIT_CAP)
    tanh = (1.0 - shrink) / (1.0 + shrink)
    return LOGIT_CAP * tl.where(logits < 0, -tanh, tanh)


@triton.jit
def log_sum(values, axis: tl.constexpr):
    """log(sum(exp(values))) over ``axis``; -inf where every value is."""
    largest = tl.max(values, axis=axis)
    anchor = tl.where(largest == float("-inf"), 0.0, largest)
    return anchor + tl.log(tl.sum(tl.exp(values - tl.expand_dims(anchor, axis)), axis=axis))


@triton.jit
def add_log_sums(a, b):
    """log(exp(a) + exp(b)); -inf where both are."""
    largest = tl.maximum(a, b)
    anchor = tl.where(largest == float("-inf"), 0.0, largest)
    return anchor + tl.log(tl.exp(a - anchor) + tl.exp(b - anchor))


@triton.jit
def body_log_sums(page, log_sums, borders, body_start, body_end, PAGE_SIZE: tl.constexpr):
    """Log-sums over the body tokens of pages: those of the page, of a border, or -inf outside the body.

    Args:
        page: indices of the pages.
        log_sums: of the whole pages.
        borders: pointer to the two border entries, broadcastable to ``page``.
        body_start, body_end: first token of the body and first after it.
    """
    first = page * PAGE_SIZE
    inside = (first >= body_start) & (first + PAGE_SIZE <= body_end)
    touched = tl.maximum(first, body_start) < tl.minimum(first + PAGE_SIZE, body_end)
    at_query = page == body_end // PAGE_SIZE
    border = tl.load(borders + tl.where(at_query, 1, 0), mask=touched & ~inside, other=float("-inf"))
    return tl.where(inside, log_sums, tl.where(touched, border, float("-inf")))
