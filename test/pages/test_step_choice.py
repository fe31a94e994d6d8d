"""The requests of a step choose together what each would choose alone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from sgl_importance_kernels.pages.page_choice import ChoiceRule, best_pages
from sgl_importance_kernels.pages.step_choice import StepContexts, choose_pages, fewest_pages

SIZE, HEADS = 4, 3

rules = st.builds(
    ChoiceRule,
    sink_tokens=st.integers(0, 9),
    window_tokens=st.integers(0, 9),
    top_p=st.sampled_from((0.5, 0.9, 1.0)),
    least_share=st.sampled_from((0.0, 0.1)),
)
rows = st.lists(st.tuples(st.integers(SIZE, 25 * SIZE), st.integers(0, 20)), min_size=1, max_size=4)


def drawn(lengths: list[int], seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Pages of each context, and the logits of those that are complete."""
    draws = torch.Generator().manual_seed(seed)
    pages = [torch.randperm(500, generator=draws)[: -(-tokens // SIZE)] + 1 for tokens in lengths]
    return pages, [4 * torch.randn(HEADS, tokens // SIZE, generator=draws) for tokens in lengths]


def stepped(
    pages: list[torch.Tensor],
    logits: list[torch.Tensor],
    lengths: list[int],
    budgets: list[int],
    rule: ChoiceRule,
    unit_pages: int = 1,
    bonus: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    complete = [tokens // SIZE for tokens in lengths]
    most = max(
        min(max(budget, fewest_pages(rule, tokens, SIZE)), count)
        for budget, tokens, count in zip(budgets, lengths, complete, strict=True)
    )
    contexts = StepContexts(
        pages=pad_sequence(pages, batch_first=True),
        num_tokens=torch.tensor(lengths),
        max_pages=torch.tensor(budgets),
        most_chosen=most,
        page_size=SIZE,
    )
    padded = torch.full((len(pages), HEADS, contexts.pages.shape[1]), -torch.inf)
    for row, each in enumerate(logits):
        padded[row, :, : each.shape[1]] = each
    return choose_pages(padded, contexts, rule, unit_pages=unit_pages, bonus=bonus)


def alone(
    logits: torch.Tensor, tokens: int, budget: int, rule: ChoiceRule, unit_pages: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    complete = tokens // SIZE
    return best_pages(
        logits,
        max_pages=budget - (tokens % SIZE > 0),
        num_sinks=-(-rule.sink_tokens // SIZE),
        num_recent=complete - max(tokens - rule.window_tokens, 0) // SIZE,
        unit_pages=unit_pages,
        top_p=rule.top_p,
        least_share=rule.least_share,
    )


@given(rows, rules, st.integers(0, 2**31))
def test_each_row_is_what_it_would_be_alone(
    lengths_and_budgets: list[tuple[int, int]], rule: ChoiceRule, seed: int
) -> None:
    lengths, budgets = (list(each) for each in zip(*lengths_and_budgets, strict=True))
    pages, logits = drawn(lengths, seed)
    found, shares = stepped(pages, logits, lengths, budgets, rule)
    for row, (tokens, budget) in enumerate(lengths_and_budgets):
        expected, expected_shares = alone(logits[row], tokens, budget, rule)
        count = len(expected)
        assert found[row, :count].tolist() == pages[row][expected].tolist()
        assert bool((found[row, count:] == -1).all())
        torch.testing.assert_close(shares[row, :count], expected_shares)
        assert not bool(shares[row, count:].any())


@given(rows, st.integers(0, 2**31))
def test_units_are_as_good_as_those_taken_alone(
    lengths_and_budgets: list[tuple[int, int]], seed: int
) -> None:
    """Which pages of the last unit are taken may differ."""
    lengths, budgets = (list(each) for each in zip(*lengths_and_budgets, strict=True))
    rule = ChoiceRule(sink_tokens=SIZE, window_tokens=0)
    pages, logits = drawn(lengths, seed)
    found, _ = stepped(pages, logits, lengths, budgets, rule, unit_pages=4)
    for row, (tokens, budget) in enumerate(lengths_and_budgets):
        expected, _ = alone(logits[row], tokens, budget, rule, unit_pages=4)
        number_of = {int(page): number for number, page in enumerate(pages[row])}
        taken = [number_of[int(page)] for page in found[row] if page >= 0]
        assert sorted(number // 4 for number in taken) == sorted(int(each) // 4 for each in expected)


def test_a_bonus_counts() -> None:
    pages, logits = drawn([16 * SIZE], 0)
    rule = ChoiceRule(sink_tokens=0, window_tokens=0)
    worst = int(logits[0].softmax(dim=1).amax(dim=0).argmin())
    bonus = torch.zeros(1, 16)
    bonus[0, worst] = 50.0
    assert int(pages[0][worst]) not in stepped(pages, logits, [16 * SIZE], [3], rule)[0].tolist()[0]
    assert int(pages[0][worst]) in stepped(pages, logits, [16 * SIZE], [3], rule, bonus=bonus)[0].tolist()[0]


def test_the_page_that_is_filled_stands_apart() -> None:
    contexts = StepContexts(
        torch.tensor([[7, 8, 9], [4, 5, 0]]), torch.tensor([9, 8]), torch.tensor([1, 1]), 1, SIZE
    )
    assert contexts.num_complete.tolist() == [2, 2]
    assert contexts.partial_page.tolist() == [9, -1]
