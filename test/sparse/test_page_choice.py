"""The pages that queries read: those of a definition without tensors, whoever else chooses beside them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from sgl_importance_kernels.sparse import choice_loop, page_choice
from sgl_importance_kernels.sparse.page_choice import ChoiceRule, Contexts

SIZE, QUERIES = 4, 3

rules = st.builds(
    ChoiceRule,
    sink_tokens=st.integers(0, 9),
    window_tokens=st.integers(0, 9),
)
rows = st.lists(st.tuples(st.integers(SIZE, 25 * SIZE), st.integers(0, 20)), min_size=1, max_size=4)


def drawn(lengths: list[int], seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Pages of each context, and the logits of those before the last."""
    draws = torch.Generator().manual_seed(seed)
    pages = [torch.randperm(500, generator=draws)[: -(-tokens // SIZE)] + 1 for tokens in lengths]
    return pages, [4 * torch.randn(QUERIES, (tokens - 1) // SIZE, generator=draws) for tokens in lengths]


def chosen(
    pages: list[torch.Tensor],
    logits: list[torch.Tensor],
    lengths: list[int],
    budgets: list[int],
    rule: ChoiceRule,
) -> list[dict[int, float]]:
    """Of each context, the numbers of the pages that are read, and the share of each."""
    contexts = Contexts.of(pad_sequence(pages, batch_first=True), lengths, budgets, rule, SIZE)
    padded = torch.full((len(pages), QUERIES, contexts.pages.shape[1]), -torch.inf)
    for row, each in enumerate(logits):
        padded[row, :, : each.shape[1]] = each
    found, shares = page_choice.choose_pages(padded, contexts, rule)
    by_loop, shares_by_loop = choice_loop.choose_pages(padded, contexts, rule)
    assert torch.equal(by_loop, found)
    torch.testing.assert_close(shares_by_loop, shares)
    assert found.shape == shares.shape == (len(pages), contexts.most_chosen)
    result = []
    for context, of_row, share in zip(pages, found, shares, strict=True):
        count = int((of_row >= 0).sum())
        assert bool((of_row[count:] == -1).all()), "padding lies behind"
        assert not bool(share[count:].any())
        numbers = [context.tolist().index(page) for page in of_row[:count].tolist()]
        assert numbers == sorted(numbers), "in the order of the context"
        result.append(dict(zip(numbers, share.tolist(), strict=False)))
    return result


def defined(logits: torch.Tensor, tokens: int, budget: int, rule: ChoiceRule) -> dict[int, float]:
    """The same by the definition, page by page, without tensors."""
    weights = [[math.exp(logit) for logit in row] for row in logits.double().tolist()]
    before = (tokens - 1) // SIZE
    shares = [max(row[page] / sum(row) for row in weights) for page in range(before)]

    def is_forced(page: int) -> bool:
        return page * SIZE < rule.sink_tokens or (page + 1) * SIZE > tokens - rule.window_tokens

    def worth(page: int) -> float:
        return math.inf if is_forced(page) else shares[page]

    forced = sum(map(is_forced, range(before)))
    count = max(budget - 1, forced)
    best = sorted(range(before), key=worth, reverse=True)[:count]
    return {page: shares[page] for page in sorted(best)}


@settings(derandomize=True)  # what lies within a rounding error of a threshold may fall on either side
@given(rows, rules, st.integers(0, 2**31))
def test_each_row_chooses_as_defined(
    lengths_and_budgets: list[tuple[int, int]], rule: ChoiceRule, seed: int
) -> None:
    lengths, budgets = (list(each) for each in zip(*lengths_and_budgets, strict=True))
    pages, logits = drawn(lengths, seed)
    found = chosen(pages, logits, lengths, budgets, rule)
    for row, (tokens, budget) in enumerate(lengths_and_budgets):
        assert found[row] == pytest.approx(defined(logits[row], tokens, budget, rule), rel=1e-4)


def test_the_page_of_the_newest_token_stands_apart() -> None:
    contexts = Contexts(
        torch.tensor([[7, 8, 9], [4, 5, 0]]), torch.tensor([9, 8]), torch.tensor([1, 1]), 1, SIZE
    )
    assert contexts.num_before.tolist() == [2, 1]
    assert contexts.last_page.tolist() == [9, 5]
