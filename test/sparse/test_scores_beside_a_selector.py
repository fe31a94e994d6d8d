"""Page scores beside a selector: those of tokens that read all pages, and of no others."""

from __future__ import annotations

import pytest

from sglang_importance.attention.rows import Phase

from support.drivers.attention_driver import Sequence
from support.drivers.choosing_driver import PROMPT, ChoosingDriver


def test_a_prompt_that_reads_everything_is_observed_and_its_answer_is_not() -> None:
    driver, sequence = ChoosingDriver(), Sequence("a", slot=1)
    selection = driver.begin(sequence)
    driver.extend((sequence, PROMPT))
    driver.check_row(sequence, Phase.PREFILL, list(range(PROMPT - 4, PROMPT)))
    for _ in range(3):
        driver.decode(sequence)
    assert 0 < selection.selected < selection.candidates
    assert driver.rows.consume(sequence.slot, Phase.DECODE) is None


@pytest.mark.parametrize(("window", "observed"), [(4, []), (32, []), (40, list(range(40, 48)))])
def test_the_last_tokens_of_a_prompt_that_choose_are_left_out(window: int, observed: list[int]) -> None:
    # The last 20 choose, from the start of their page: from token 48.
    driver, sequence = ChoosingDriver(window=window, prompt_tokens=20), Sequence("a", slot=1)
    driver.begin(sequence)
    driver.extend((sequence, PROMPT))
    if observed:
        driver.check_row(sequence, Phase.PREFILL, observed)
    else:
        assert driver.rows.consume(sequence.slot, Phase.PREFILL) is None


def test_tokens_of_a_short_context_are_observed_until_they_choose() -> None:
    driver, sequence = ChoosingDriver(min_context=PROMPT + 3), Sequence("a", slot=1)
    driver.begin(sequence)
    driver.extend((sequence, PROMPT))
    for _ in range(8):
        driver.decode(sequence)
    driver.check_row(sequence, Phase.DECODE, [PROMPT, PROMPT + 1, PROMPT + 2])


def test_requests_of_one_batch_are_told_apart() -> None:
    driver = ChoosingDriver()
    choosing, exact = Sequence("choosing", slot=1), Sequence("exact", slot=2)
    driver.begin(choosing)
    driver.begin(exact, reads_all=True)
    driver.extend((choosing, PROMPT), (exact, PROMPT))
    for _ in range(2):
        driver.decode(choosing, exact)
    for sequence in (choosing, exact):
        driver.check_row(sequence, Phase.PREFILL, list(range(PROMPT - 4, PROMPT)))
    driver.check_row(exact, Phase.DECODE, [PROMPT, PROMPT + 1])
    assert driver.rows.consume(choosing.slot, Phase.DECODE) is None
