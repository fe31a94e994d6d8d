"""Single tokens of many requests attend to their pages together."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance_kernels.sparse.page_slots import PageSlots
from sgl_importance_kernels.sparse.step_attention import attend_step, can_attend_in_place

from support.paged_context import DIM, KV_HEADS, PAGE, SCALE, filled_slots


def step(slots: PageSlots, queries: torch.Tensor, contexts: list[int]) -> torch.Tensor:
    """Each row attends to the first tokens of the pool's context; the last of its pages comes first."""
    last = [-(-tokens // PAGE) for tokens in contexts]
    pages = torch.full((len(contexts), max(last)), -1)
    for row, count in enumerate(last):
        pages[row, :count] = torch.tensor([count, *range(1, count)])
    last_tokens = torch.tensor([(tokens - 1) % PAGE + 1 for tokens in contexts])
    outputs, rows = torch.empty(*queries.shape[:2], DIM), torch.arange(len(contexts))
    places = slots.place(0, pages)
    attend_step(slots, 0, queries, rows, places, last_tokens, SCALE, outputs)
    return outputs


@given(
    contexts=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    groups=st.sampled_from((1, 3)),
    num_slots=st.integers(1, 30),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_each_row_is_dense_attention(contexts: list[int], groups: int, num_slots: int, seed: int) -> None:
    torch.manual_seed(seed)
    slots = filled_slots(num_slots, max(contexts), torch.float32)
    queries = torch.randn(len(contexts), groups * KV_HEADS, DIM)
    outputs = step(slots, queries, contexts)
    slots.flush(0)
    for row, tokens in enumerate(contexts):
        keys, values = (host.flatten(0, 1)[PAGE : PAGE + tokens] for host in slots.host[0])
        by_head = queries[row].view(KV_HEADS, groups, DIM)
        logits = torch.einsum("kgd,nkd->kgn", by_head, keys) * SCALE
        expected = torch.einsum("kgn,nkd->kgd", logits.softmax(dim=-1), values)
        torch.testing.assert_close(outputs[row], expected.flatten(0, 1))


@given(tokens=st.integers(1, 90), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_neither_slots_nor_the_batch_change_a_bit(tokens: int, seed: int) -> None:
    queries = torch.randn(3, 2 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    outputs = []
    for num_slots in (1, 2, 40):
        torch.manual_seed(seed)
        slots = filled_slots(num_slots, 90, torch.float32)
        for others in ([], [7], [90, 33]):
            slots.begin_pass(torch.tensor([], dtype=torch.int64))
            rows = queries[: 1 + len(others)]
            outputs.append(step(slots, rows, [tokens, *others])[0])
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_a_page_in_a_slot_is_not_loaded_again() -> None:
    slots = filled_slots(4, 10 * PAGE, torch.float32)
    for _ in range(2):
        step(slots, torch.randn(1, KV_HEADS, DIM), [10 * PAGE])
    assert slots.traffic.read == 20
    assert slots.traffic.loaded == 10 + 7  # three of four slots are no frames


def test_only_float32_is_read_in_place_on_a_cpu() -> None:
    assert can_attend_in_place(filled_slots(2, PAGE, torch.float32))
    assert not can_attend_in_place(filled_slots(2, PAGE, torch.bfloat16))
