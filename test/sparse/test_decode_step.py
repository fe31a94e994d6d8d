"""Single tokens are computed together, as many at a time as there is room for."""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance_kernels.sparse.page_choice import MOST_PAGES
from sglang_importance.sparse import decode_step
from sglang_importance.sparse.decode_step import STEP_PAGES, choosing_parts, parts

from support.drivers.attention_driver import NUM_LAYERS, Sequence
from support.drivers.choosing_driver import PROMPT, ChoosingDriver

ANSWER = 12


@given(st.lists(st.sampled_from((1, 1000, STEP_PAGES // 3, STEP_PAGES // 2, STEP_PAGES + 1)), max_size=12))
def test_parts_are_all_spans_in_order_each_as_large_as_may_be(lengths: list[int]) -> None:
    spans = [SimpleNamespace(pages=range(length)) for length in lengths]
    divided: list[Items[SimpleNamespace]] = list(parts(spans))  # type: ignore[arg-type]
    assert [span for part in divided for span in part] == spans

    def pages(part: Items[SimpleNamespace]) -> int:
        return len(part) * max(len(span.pages) for span in part)

    assert all(len(part) == 1 or pages(part) <= STEP_PAGES for part in divided)
    assert all(pages([*part, behind[0]]) > STEP_PAGES for part, behind in pairwise(divided))


def test_a_context_that_no_kernel_holds_is_chosen_among_apart() -> None:
    spans = [SimpleNamespace(pages=range(length)) for length in (9, MOST_PAGES + 1, MOST_PAGES, 3)]
    divided = list(choosing_parts(spans))  # type: ignore[arg-type]
    assert divided == [[spans[0], spans[2], spans[3]], [spans[1]]]
    assert list(choosing_parts(spans[:1])) == [spans[:1]]  # type: ignore[arg-type]


def computed_again() -> tuple[ChoosingDriver, list[torch.Tensor]]:
    """A retracted answer comes back behind its cached prompt, in one pass; its outputs, by layer."""
    driver, sequence, again = ChoosingDriver(), Sequence("a", slot=1), Sequence("a", slot=2)
    driver.begin(sequence)
    driver.extend((sequence, PROMPT))
    driver.adopt_prefix(again, sequence, PROMPT)
    driver.extend((again, ANSWER))
    return driver, driver.outputs[-NUM_LAYERS:]


def test_a_retracted_answer_takes_no_more_room_than_a_step_may(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, expected = computed_again()
    assert len(driver.backend._steps) == 1
    monkeypatch.setattr(decode_step, "STEP_PAGES", 20)
    driver, outputs = computed_again()
    steps = driver.backend._steps
    assert len(steps) > 1
    assert all(step.everything.numel() <= 20 for step in steps)
    assert sum(len(step.spans) for step in steps) == ANSWER
    assert all(torch.equal(output, wanted) for output, wanted in zip(outputs, expected, strict=True))


def test_what_is_kept_of_pages_is_asked_for_once_until_pages_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, sequence = ChoosingDriver(), Sequence("a", slot=1)
    driver.begin(sequence)
    driver.extend((sequence, PROMPT))
    representations = driver.runner.token_to_kv_pool.slots.representations
    asked: list[torch.Tensor] = []
    ensure = representations.ensure
    monkeypatch.setattr(representations, "ensure", lambda pages: (asked.append(pages), ensure(pages)))
    for _ in range(3):
        driver.decode(sequence)
    assert len(asked) == 1
    driver.runner.token_to_kv_pool.slots.forget(torch.tensor([sequence.locations[0] // driver.page_size]))
    driver.decode(sequence)
    assert len(asked) == 2
