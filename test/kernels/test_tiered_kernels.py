"""Triton kernels of tiered pages against their definitions; in the interpreter or on a device."""

from __future__ import annotations

import pytest
import torch
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_importance_kernels.sparse.page_slots import PageSlots
from sgl_importance_kernels.sparse.representations import Representations
from sgl_importance_kernels.sparse.triton import attention_kernel
from sgl_importance_kernels.sparse.triton.attention_kernel import attend_places
from sgl_importance_kernels.sparse.triton.copy_kernel import copy_pages
from sgl_importance_kernels.sparse.triton.scan_kernel import scan
from sgl_importance_lab.selectors.registry import ready_selector

from support.nightly_cases import rest_nightly

pytestmark = pytest.mark.triton

POOL, KV_HEADS, DIM, VALUE_DIM = 40, 2, 24, 20
# The interpreter takes seconds for as many pages as a program reads on a device.
SPLIT_PAGES = 8 if triton.knobs.runtime.interpret else attention_kernel.SPLIT_PAGES
few = settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)


@pytest.fixture(autouse=True)
def _split_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernel, "SPLIT_PAGES", SPLIT_PAGES)


def host(buffer: torch.Tensor, device: str) -> torch.Tensor:
    return buffer if device == "cpu" else buffer.pin_memory()


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


OTHER_SCANS = [
    (name, size, group)
    for name, size in (("bits", 16), ("bits", 32), ("token", 8), ("token", 16), ("token", 3))
    for group in (1, 3)
    if (name, size, group) not in (("bits", 16, 3), ("token", 3, 1))
]


# The interpreter takes half a minute for some.
@pytest.mark.parametrize(
    ("name", "page_size", "group"),
    rest_nightly([("bits", 16, 3), ("token", 3, 1), *OTHER_SCANS], daily=2),
)
def test_a_scan_finds_what_the_compiled_one_finds(name: str, page_size: int, group: int, device: str) -> None:
    random = draws(0)
    keys = torch.randn(POOL, page_size, KV_HEADS, DIM, generator=random)
    queries = torch.randn(3, KV_HEADS * group, DIM, generator=random)
    pages = torch.stack([torch.randperm(POOL, generator=random)[:21] for _ in range(3)])
    counts = torch.tensor([21, 5, 0])
    here = Representations(ready_selector(name, keys[None]), (keys,), "cpu")
    selector = ready_selector(name, keys[None], device)
    there = Representations(selector, (host(keys, device),), device, uses_triton=True)
    there.ensure(torch.arange(POOL, device=device))
    estimates = there.scan(
        0,
        (2 * queries).to(device),
        torch.arange(3, device=device),
        0.5,
        pages.to(device),
        counts.to(device),
    )
    found = estimates.logits.cpu()
    of_tiles = (estimates.largest + estimates.sums.log()).logsumexp(dim=2).cpu()
    torch.testing.assert_close(of_tiles, found.logsumexp(dim=2))
    # Compiled for a CPU, what each bit is worth is rounded to a 65,535th of what all are worth.
    tolerance = 1e-2 if name == "bits" else 3e-4
    for row, count in enumerate(counts.tolist()):
        expected = here.selector.logits(queries[row : row + 1], here.of(0, pages[row, :count]))
        torch.testing.assert_close(found[row, :, :count], expected, atol=tolerance, rtol=1e-4)
        assert bool(found[row, :, count:].isneginf().all())
    # Queries that share their pages: those of a prompt's span.
    alike = there.of(0, pages[0].to(device))
    expected = here.selector.logits(queries, here.of(0, pages[0]))
    together = there.selector.logits(queries.to(device), alike).cpu()
    torch.testing.assert_close(together, expected, atol=tolerance, rtol=1e-4)


def test_a_scan_of_nothing(device: str) -> None:
    vectors = torch.zeros(2, KV_HEADS, 4, DIM, dtype=torch.int8, device=device)
    nothing = torch.zeros(2, 0, dtype=torch.int64, device=device)
    queries = torch.zeros(2, KV_HEADS, DIM, device=device)
    units = torch.zeros(2, KV_HEADS, device=device)
    rows, counts = torch.arange(2, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    assert scan(queries, rows, 1.0, vectors, units, nothing, counts).logits.shape == (2, KV_HEADS, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_go_either_way_and_some_are_left_out(dtype: torch.dtype, device: str) -> None:
    pool = host(torch.randn(POOL, 8, KV_HEADS, 70, generator=draws(1)).to(dtype), device)
    slots = torch.zeros(6, 8, KV_HEADS, 70, dtype=dtype, device=device)
    pages = torch.tensor([7, -1, 9, 11], device=device)
    copy_pages(pool, pages, slots, torch.tensor([2, 3, -1, 5], device=device))
    assert torch.equal(slots[[2, 5]].cpu(), pool[[7, 11]])
    assert not bool(slots[[0, 1, 3, 4]].any())
    copy_pages(slots, torch.tensor([5], device=device), pool, torch.tensor([0], device=device))
    if device != "cpu":
        torch.cuda.synchronize()
    assert torch.equal(pool[0], pool[11])


class Case:
    """Rows that read pages in slots and on the host."""

    def __init__(self, counts: list[int], page_size: int, group: int, device: str, seed: int = 2) -> None:
        random = draws(seed)
        shape = (page_size, KV_HEADS)
        self.keys = torch.randn(POOL, *shape, DIM, generator=random)
        self.values = torch.randn(POOL, *shape, VALUE_DIM, generator=random)
        self.num_slots = POOL // 2
        self.queries = torch.randn(len(counts), KV_HEADS * group, DIM, generator=random)
        self.last_tokens = torch.randint(1, page_size + 1, (len(counts),), generator=random)
        self.places = torch.full((len(counts), max(counts)), -1)
        for row, count in enumerate(counts):
            self.places[row, :count] = torch.randint(0, POOL, (count,), generator=random)
        self.device, self.scale = device, DIM**-0.5

    def found(self, rows: slice = slice(None)) -> torch.Tensor:
        """Outputs of these rows, which other tokens stand around."""
        slots = [part[: self.num_slots].contiguous().to(self.device) for part in (self.keys, self.values)]
        pool = [host(part[self.num_slots :].contiguous(), self.device) for part in (self.keys, self.values)]
        of_rows = self.queries[rows]
        count, heads, _ = of_rows.shape
        at = 1 + torch.arange(count).flip(0)
        queries = torch.randn(count + 2, heads, DIM)
        queries[at] = of_rows
        outputs = torch.zeros(count + 2, heads, VALUE_DIM, device=self.device)
        arrivals = torch.zeros(count * KV_HEADS, dtype=torch.int32, device=self.device)
        attend_places(
            queries.to(self.device),
            at.to(self.device),
            (slots[0], slots[1]),
            (pool[0], pool[1]),
            self.places[rows].to(self.device),
            self.last_tokens[rows].to(self.device),
            self.scale,
            arrivals,
            outputs,
        )
        assert not bool(arrivals.any())
        assert not bool(outputs[[0, -1]].any())
        return outputs.cpu()[at]

    def expected(self, row: int) -> torch.Tensor:
        kept = [
            (place, int(self.last_tokens[row]) if column == 0 else self.keys.shape[1])
            for column, place in enumerate(self.places[row].tolist())
            if place >= 0
        ]
        keys = torch.cat([self.keys[place, :tokens] for place, tokens in kept]).double()
        values = torch.cat([self.values[place, :tokens] for place, tokens in kept]).double()
        by_head = self.queries[row].double().view(KV_HEADS, -1, DIM)
        logits = torch.einsum("kgd,nkd->kgn", by_head, keys) * self.scale
        output = torch.einsum("kgn,nkd->kgd", logits.softmax(dim=-1), values)
        return output.flatten(0, 1).float()


@few
@given(
    counts=st.lists(st.integers(1, 2 * SPLIT_PAGES + 3), min_size=1, max_size=3),
    page_size=st.sampled_from((4, 16, 128)),
    group=st.sampled_from((1, 3)),
    seed=st.integers(0, 99),
)
def test_attention_is_that_of_the_definition(
    counts: list[int], page_size: int, group: int, seed: int, device: str
) -> None:
    case = Case(counts, page_size, group, device, seed)
    outputs = case.found()
    for row in range(len(counts)):
        torch.testing.assert_close(outputs[row], case.expected(row), atol=2e-5, rtol=1e-4)


def test_a_row_does_not_hang_on_its_batch(device: str) -> None:
    case = Case([5, 3 * SPLIT_PAGES, 1], 16, 3, device)
    together = case.found()
    for row in range(3):
        assert torch.equal(together[row], case.found(slice(row, row + 1))[0])


def test_a_row_that_is_filling_no_page(device: str) -> None:
    case = Case([6, 6], 16, 1, device)
    case.places[0, 0] = -1
    torch.testing.assert_close(case.found()[0], case.expected(0), atol=2e-5, rtol=1e-4)


def test_pages_that_get_no_slot_are_read_on_the_host(device: str) -> None:
    """Two slots for the four pages of two requests, which both read page 7: it crosses twice."""
    pools = [
        host(torch.randn(12 * 4, KV_HEADS, dim, generator=draws(dim)), device) for dim in (DIM, VALUE_DIM)
    ]
    slots = PageSlots(
        [pools[0]],
        [pools[1]],
        num_frames=1,
        num_slots=3,
        page_size=4,
        staging_pages=2,
        device=device,
        uses_triton=True,
    )
    slots.begin_pass(torch.zeros(0, dtype=torch.int64, device=device))
    pages = torch.tensor([[3, 5, 7], [7, 9, -1]], device=device)
    places = slots.place(0, pages, is_chosen=True)
    slots.check_integrity()
    assert sorted(int(place) for place in places.flatten() if 0 <= place < 3) == [1, 2]
    buffers = zip((slots.keys[0], slots.values[0]), slots.host[0], strict=True)
    for kept, pool in buffers:
        everywhere = torch.cat([kept.cpu(), pool])
        found = pages >= 0
        assert torch.equal(everywhere[places[found].cpu()], pool[pages[found].cpu()])
    assert int(places[1, 2]) == -1
    slots.settle()
    assert (slots.traffic.read, slots.traffic.loaded) == (5, 5)


def test_steps_write_what_passes_write(device: str) -> None:
    """Requests that begin, reopen and complete pages, and padding; frames, slots and host end up alike."""
    size, rows = 4, 3
    tables = []
    for _ in range(2):
        pools = [host(torch.zeros(12 * size, KV_HEADS, dim), device) for dim in (DIM, VALUE_DIM)]
        tables.append(
            PageSlots(
                [pools[0]],
                [pools[1]],
                num_frames=rows,
                num_slots=rows + 2,
                page_size=size,
                staging_pages=2,
                device=device,
                uses_triton=True,
            )
        )
    of_passes, of_steps = tables
    draws_ = draws(5)

    def new(count: int) -> list[torch.Tensor]:
        return [torch.randn(count, KV_HEADS, dim, generator=draws_).to(device) for dim in (DIM, VALUE_DIM)]

    # Two tokens of page 9 are on the host only.
    for slots in tables:
        for buffer in slots.host[0]:
            buffer[9, :2] = 1.0
    for at in range(6):
        places = torch.tensor([size + at, 4 * size + at + 3, 9 * size + min(2 + at, 3), 0])
        if at > 1:
            places[2] = 0
        values = new(len(places))
        plan = of_passes.begin_pass(places.to(device))
        of_passes.write(0, plan, *values)
        completed = [row for row, each in enumerate(places.tolist()) if each % size == size - 1]
        of_steps.write_step(0, of_steps.begin_step(places.to(device), completed), *values)
        of_steps.check_integrity()
        assert torch.equal(of_steps.open_pages.frame_of, of_passes.open_pages.frame_of)
        _, frames = of_passes.open_pages.open()
        for mine, theirs in ((of_steps.keys, of_passes.keys), (of_steps.values, of_passes.values)):
            assert torch.equal(mine[0][frames], theirs[0][frames])
        for mine, theirs in zip(of_steps.host[0], of_passes.host[0], strict=True):
            assert torch.equal(mine[1:], theirs[1:])
    assert of_steps.traffic.written == of_passes.traffic.written > 0
