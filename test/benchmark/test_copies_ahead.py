"""What each order of copies reads, by hand; what it covers, beside a plain sum."""

from __future__ import annotations

import pytest
import torch

from benchmark.sparse.real.choosing import RULE
from benchmark.sparse.real.orders import (
    Covered,
    LastLayer,
    Ordered,
    Resident,
    exact,
    forced,
    last_step,
)

PAGE, START, TOKENS, PAGES = 4, 640, 3, 161
PAGES_READ = [{90, 91}, {90, 92}, {40, 92}]
"""By token, but for those that are always read."""


def chosen_of(pages: list[set[int]]) -> torch.Tensor:
    chosen = forced(START, TOKENS, PAGES, PAGE)
    for token, of_token in enumerate(pages):
        chosen[token, list(of_token)] = True
    return chosen


def free(read: torch.Tensor) -> list[set[int]]:
    always = forced(START, TOKENS, PAGES, PAGE)
    assert (read | ~always).all(), "sinks, window and the page that is being filled are always read"
    return [set(row.nonzero()[:, 0].tolist()) for row in read & ~always]


def test_what_is_always_read() -> None:
    (first, *_) = forced(START, TOKENS, PAGES, PAGE)
    sinks = set(range(-(-RULE.sink_tokens // PAGE)))
    recent = {token // PAGE for token in range(START + 1 - RULE.window_tokens, START + 1)}
    assert set(first.nonzero()[:, 0].tolist()) == sinks | recent


def test_the_last_step_reads_what_it_chose() -> None:
    chosen, always = chosen_of(PAGES_READ), forced(START, TOKENS, PAGES, PAGE)
    assert free(exact(0, 0, chosen, always)) == PAGES_READ
    assert free(last_step(0, 0, chosen, always)) == [{90, 91}, {90, 91}, {90, 92}]


def test_the_layer_before_says_what_the_next_reads() -> None:
    order, always = LastLayer(), forced(START, TOKENS, PAGES, PAGE)
    below, above = PAGES_READ, [{50}, {51}, {52}]
    assert free(order(0, 0, chosen_of(below), always)) == below
    assert free(order(1, 0, chosen_of(above), always)) == [{50}, *below[1:]]
    assert free(order(0, 1, chosen_of(above), always)) == above, "another task has layers of its own"


def test_only_what_is_on_the_device_is_read() -> None:
    """Three slots behind those that are always read: a prompt's last pages, then what was chosen last."""
    always = forced(START, TOKENS, PAGES, PAGE)
    order = Resident(int(always[0].sum()) + 3)
    last_of_prompt = int(always[0].nonzero()[RULE.num_sinks(PAGE)]) - 1
    found = free(order(0, 0, chosen_of([{90, 91}, {90, 92, last_of_prompt}, {40, 92}]), always))
    # The first token waits for 90 and 91. Of the second's 92 is copied for the third, whose 40 is missing.
    assert found == [{90, 91}, {90, last_of_prompt}, {92}]
    assert (order.missing, order.named, order.chosen) == (2, 0, 5 + int(always[1:].sum()))
    order(1, 0, chosen_of([set(), {92}, {40, 70}]), always)
    assert (order.missing, order.named) == (5, 2), (
        "92 and 40 of the next layer's three were named by this one"
    )


def test_covered_attention_is_a_plain_sum() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(TOKENS, 4, 8), torch.randn(START + TOKENS, 2, 8)
    chosen = chosen_of(PAGES_READ)
    covered = Covered({"exact": exact, "last step": last_step}, [START], PAGE)
    assert covered(3, 0, queries, keys, chosen[:, None].expand(-1, 2, -1)).all(), "everything is read"
    expected = {"exact": 0.0, "last step": 0.0}
    before = last_step(3, 0, chosen, forced(START, TOKENS, PAGES, PAGE))
    for name, read in (("exact", chosen), ("last step", before)):
        for token in (1, 2):
            size = START + token + 1
            for head in range(4):
                weights = (keys[:size, head // 2] @ queries[token, head] / 8**0.5).softmax(0)
                allowed = read[token].repeat_interleave(PAGE)[:size]
                expected[name] += float(weights[allowed].sum()) / 4
    assert covered.mass == pytest.approx(expected, rel=1e-5)
    assert covered.total == pytest.approx(2.0, rel=1e-5)
    assert (covered.again, covered.chosen) == (2, 4), "90 and 92 again, of two for each of two tokens"


def test_an_order_is_read_by_all_heads() -> None:
    chosen = chosen_of(PAGES_READ)[:, None].expand(-1, 2, -1)
    read = Ordered(last_step, [START], PAGE)(0, 0, torch.empty(0), torch.empty(0), chosen)
    assert read.shape == chosen.shape
    assert free(read[:, 0]) == free(read[:, 1]) == [{90, 91}, {90, 91}, {90, 92}]
