"""The device's part of tiered pages, counted to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.sparse.device_plan import DevicePlan, DeviceTooSmall, KvShape, plan_device
from sgl_importance_kernels.sparse.page_slots import PageSlots
from sgl_importance_kernels.sparse.selectors.registry import SELECTORS
from sgl_importance_kernels.sparse.selectors.selector import Selector

LLAMA_8B = KvShape(layers=32, kv_heads=8, key_dim=128, value_dim=128, item_bytes=2)


def slots_of(plan: DevicePlan, selector: Selector | None = None) -> PageSlots:
    shape, dtype = plan.shape, {2: torch.bfloat16, 4: torch.float32}[plan.shape.item_bytes]
    host = [
        [torch.zeros(plan.num_pages * plan.page_size, shape.kv_heads, dim, dtype=dtype)] * shape.layers
        for dim in (shape.key_dim, shape.value_dim)
    ]
    return PageSlots(
        *host,
        num_frames=plan.num_frames,
        num_slots=plan.num_slots,
        page_size=plan.page_size,
        staging_pages=plan.staging_pages,
        device="cpu",
        selector=selector,
    )


shapes = st.builds(
    KvShape,
    layers=st.integers(1, 4),
    kv_heads=st.integers(1, 4),
    key_dim=st.sampled_from((4, 32)),
    value_dim=st.sampled_from((4, 16)),
    item_bytes=st.sampled_from((2, 4)),
)


@given(
    shape=shapes,
    page_size=st.sampled_from((2, 16, 64)),
    pages=st.integers(1, 300),
    device_tokens=st.integers(512, 8192),
    max_requests=st.none() | st.integers(1, 64),
    name=st.none() | st.sampled_from(("bits", "token")),
)
def test_what_is_allocated_is_what_is_planned_and_within_the_budget(
    shape: KvShape, page_size: int, pages: int, device_tokens: int, max_requests: int | None, name: str | None
) -> None:
    selector = SELECTORS[name](page_size) if name and not (name == "bits" and page_size % 16) else None
    kept = (0, 0)
    if selector is not None:
        tables = selector.table_bytes(shape.layers, shape.kv_heads, shape.key_dim)
        kept = (selector.kept_bytes(shape.key_dim), tables)
    try:
        plan = plan_device(
            shape,
            page_size=page_size,
            pool_tokens=pages * page_size,
            device_tokens=device_tokens,
            max_requests=max_requests,
            kept_bytes=kept[0],
            table_bytes=kept[1],
        )
    except DeviceTooSmall as error:
        least = int(str(error).partition("--kv-device-tokens ")[2].split()[0])
        assert least > device_tokens
        return
    assert slots_of(plan, selector).device_bytes() == plan.bytes_by_purpose
    assert plan.device_bytes <= plan.budget_bytes
    assert plan.num_frames == min(max_requests or plan.num_frames, pages) <= plan.num_slots <= plan.num_pages


@given(shape=shapes, pages=st.integers(40, 4000), max_requests=st.integers(1, 32))
def test_the_refusal_names_the_least_that_is_enough(shape: KvShape, pages: int, max_requests: int) -> None:
    arguments = {"page_size": 16, "pool_tokens": pages * 16, "max_requests": max_requests}
    with pytest.raises(DeviceTooSmall, match="use --kv-device-tokens") as refusal:
        plan_device(shape, device_tokens=1, **arguments)
    least = int(str(refusal.value).partition("--kv-device-tokens ")[2].split()[0])
    assert plan_device(shape, device_tokens=least, **arguments).num_slots >= max_requests
    with pytest.raises(DeviceTooSmall):
        plan_device(shape, device_tokens=least - 1, **arguments)


def test_no_budget_buys_more_slots_than_there_are_pages() -> None:
    plan = plan_device(LLAMA_8B, page_size=16, pool_tokens=160, device_tokens=10**6, max_requests=None)
    assert plan.num_slots == plan.num_pages == 11


def test_slots_take_most_of_a_device_of_usual_size() -> None:
    plan = plan_device(LLAMA_8B, page_size=16, pool_tokens=2**20, device_tokens=2**16, max_requests=None)
    assert plan.slot_tokens > 0.97 * 2**16
    assert replace(plan, num_slots=plan.num_slots + 1).device_bytes > plan.budget_bytes - 2**20
