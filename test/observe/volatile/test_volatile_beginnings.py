"""Which prompts have a volatile beginning, and which only look like it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sgl_importance.observe.volatile import detector
from sgl_importance.observe.volatile.detector import VolatileBeginnings
from sgl_importance.observe.volatile.volatile_place import MIN_PARTINGS

VOCABULARY = 30_000
SEEDS = st.integers(0, 2**32)


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def text(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(VOCABULARY) for _ in range(count)]


def digits(number: int, width: int) -> list[int]:
    return [VOCABULARY + int(digit) for digit in f"{number:0{width}}"]


FIELDS: dict[str, Callable[[random.Random, int], list[int]]] = {
    "hash": lambda generator, number: [VOCABULARY + generator.randrange(16) for _ in range(5)],
    "clock": lambda generator, number: [
        part for unit in (3600, 60, 1) for part in digits(number * 47 // unit % 60, 2)
    ],
    "counter": lambda generator, number: digits(4000 + number, 4),
}


def fed(prompts: list[list[int]], *, found: Callable[[list[int]], int] = lambda _: 0) -> VolatileBeginnings:
    beginnings = VolatileBeginnings(Clock())
    for prompt in prompts:
        beginnings.seen(None, array("q", prompt), found(prompt))
    beginnings.check_integrity()
    return beginnings


# ---- what is found ----


@pytest.mark.parametrize("field", FIELDS)
@given(seed=SEEDS, lead=st.integers(0, 300), body=st.integers(400, 2000))
@settings(deadline=None, max_examples=25)
def test_a_planted_field_is_found_at_its_place(field: str, seed: int, lead: int, body: int):
    generator = random.Random(seed)
    front, stable = text(generator, lead), text(generator, body)
    planted = [FIELDS[field](generator, number) for number in range(1, 30)]
    beginnings = fed([[*front, *each, *stable, *text(generator, 30)] for each in planted])
    (place,) = beginnings.places()
    assert lead <= place["start_token"] < place["end_token"] <= lead + len(planted[0])
    assert place["lost_tokens"] == beginnings.lost_tokens >= place["prompts"] * body
    assert place["prompts"] >= 20
    assert place["before_ids"] == [*front, *planted[0]][: place["start_token"]][-12:]
    assert place["after_ids"] != place["before_ids"]
    for shown in place["variants_ids"]:
        assert any(each[place["start_token"] - lead :][: len(shown)] == shown for each in planted)


def test_it_is_told_after_a_few_prompts_and_counts_those_before():
    generator = random.Random(1)
    stable = text(generator, 500)
    beginnings = VolatileBeginnings(Clock())
    for number in range(MIN_PARTINGS + 1):
        assert beginnings.places() == []
        assert beginnings.lost_tokens == 0
        beginnings.seen(None, [*digits(number, 4), *stable], 0)
    assert beginnings.lost_tokens >= MIN_PARTINGS * 500
    assert len(beginnings.places()) == 1


def test_a_conversation_whose_first_line_changes_loses_all_behind_it_each_turn():
    generator = random.Random(2)
    history, prompts = text(generator, 300), []
    for _ in range(12):
        history = [*history, *text(generator, 80)]
        prompts.append([*FIELDS["hash"](generator, 0), *history])
    (place,) = fed(prompts).places()
    assert place["lost_tokens"] >= sum(len(prompt) for prompt in prompts[:-1]) - 12 * 5 - 100


def test_one_line_in_front_of_several_kinds_of_prompts_is_one_place():
    generator = random.Random(3)
    line, kinds = text(generator, 20), [text(generator, 400) for _ in range(6)]
    prompts = [[*line, *FIELDS["hash"](generator, 0), *kind] for _ in range(10) for kind in kinds]
    beginnings = fed(prompts)
    (place,) = beginnings.places()
    assert place["lost_tokens"] == beginnings.lost_tokens >= 6 * 8 * 400


def test_rates_are_of_the_time_that_was_observed_but_of_an_hour_at_least():
    now = Clock()
    beginnings = VolatileBeginnings(now)
    stable = text(random.Random(4), 400)
    for number in range(20):
        beginnings.seen(None, [*digits(number, 4), *stable], 0)
        now.seconds += 60
    (place,) = beginnings.places()
    assert place["lost_tokens_per_day"] == 24 * place["lost_tokens"]
    now.seconds += 11 * 3600
    (place,) = beginnings.places()
    assert place["lost_tokens_per_day"] == pytest.approx(place["lost_tokens"] * 86400 / now.seconds, rel=0.01)
    now.seconds += 24 * 3600
    assert beginnings.places() == [], "the client was mended"


# ---- what is not ----


@example(seed=500, requests=15)
@example(seed=833, requests=20)
@example(seed=29670, requests=20)
@given(seed=SEEDS, requests=st.integers(10, 40))
@settings(deadline=None, max_examples=25)
def test_prompts_that_part_at_random_places_are_never_reported(seed: int, requests: int):
    generator = random.Random(seed)
    stable = text(generator, 1200)
    beginnings = VolatileBeginnings(Clock())
    for _ in range(requests):
        prompt = list(stable)
        prompt[generator.randrange(500)] = VOCABULARY + generator.randrange(1000)
        beginnings.seen(None, prompt, 0)
        assert beginnings.places() == []
        assert beginnings.lost_tokens == 0


@given(seed=SEEDS, system=st.integers(0, 600), kinds=st.integers(1, 4))
@settings(deadline=None, max_examples=25)
def test_stable_prompts_are_never_reported(seed: int, system: int, kinds: int):
    """Of some kinds of sessions, whose system prompt is alike and whose questions differ."""
    generator = random.Random(seed)
    systems = [text(generator, system) for _ in range(kinds)]
    prompts = []
    for _ in range(20):
        prompt = list(generator.choice(systems))
        for _ in range(4):
            prompt = [*prompt, *text(generator, 60)]
            prompts.append(prompt)
    beginnings = fed(prompts)  # nothing was found, as if all had been evicted
    assert beginnings.places() == []
    assert beginnings.lost_tokens == 0


def test_two_variants_that_take_turns_are_not_one_that_changes():
    generator = random.Random(5)
    stable = text(generator, 500)
    beginnings = fed([[*digits(number % 2, 3), *stable] for number in range(60)])
    assert beginnings.lost_tokens == 0


def test_a_prompt_that_was_found_has_lost_nothing():
    stable = text(random.Random(6), 500)
    beginnings = fed([[*digits(number, 4), *stable] for number in range(60)], found=lambda _: 300)
    assert beginnings.lost_tokens == 0


def test_a_prompt_that_was_found_is_not_even_compared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(detector, "sketch", None)
    assert fed([text(random.Random(6), 500)], found=lambda _: 250).lost_tokens == 0


def test_a_prompt_of_which_another_part_was_evicted_has_lost_nothing_by_its_field():
    stable = text(random.Random(6), 500)
    beginnings = fed([[*digits(number, 4), *stable] for number in range(60)], found=lambda _: 100)
    assert beginnings.lost_tokens == 0


def test_a_field_in_the_second_half_is_no_beginning():
    generator = random.Random(7)
    front, behind = text(generator, 500), text(generator, 400)
    beginnings = fed([[*front, *digits(number, 4), *behind] for number in range(30)])
    assert beginnings.lost_tokens == 0


def test_namespaces_are_never_compared():
    stable = text(random.Random(8), 500)
    beginnings = VolatileBeginnings(Clock())
    for number in range(60):
        beginnings.seen(("salt", str(number)), [*digits(number, 4), *stable], 0)
    assert beginnings.lost_tokens == 0


def test_what_costs_next_to_nothing_is_counted_and_not_reported():
    generator = random.Random(9)
    stable = text(generator, 200)
    beginnings = VolatileBeginnings(Clock())
    for number in range(10):
        beginnings.seen(None, [*digits(number, 4), *stable], 0)
        beginnings.seen(None, text(generator, 50_000), 50_000)
    assert beginnings.lost_tokens > 0
    assert beginnings.places() == []


# ---- memory ----


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(detector, "MAX_KINDS", 16)
    monkeypatch.setattr(detector, "MAX_KEPT_TOKENS", 8000)
    generator = random.Random(10)
    beginnings = VolatileBeginnings(Clock())
    stable = text(generator, 400)
    for number in range(300):
        beginnings.seen(None, text(generator, generator.randrange(128, 1200)), 0)
        beginnings.check_integrity()
        if number % 4 == 0:
            beginnings.seen(None, [*digits(number, 4), *stable], 0)
    (place,) = beginnings.places()
    assert place["prompts"] > 50, "a kind that is asked for stays"


def test_variants_of_a_place_are_bounded():
    generator = random.Random(11)
    stable = text(generator, 300)
    beginnings = fed([[*digits(number, 5), *stable] for number in range(500)])
    (kind,) = beginnings._kinds.values()
    assert all(len(place._variants) <= 64 for place in kind.places)
    assert len(kind.places) <= 4
