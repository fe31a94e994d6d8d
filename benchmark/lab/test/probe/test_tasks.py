"""The task generator: deterministic, sized by tokens, and never a pairing that training shows."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe_training.training_data import chat_sequence, copy_sequence

from sgl_importance_lab.probe.document import lay_out
from sgl_importance_lab.probe.tasks import SHORTEST_PROMPT, TASKS, make_document, make_task
from sgl_importance_lab.probe.tokenizer import encode, token_ids
from sgl_importance_lab.probe.vocabulary import (
    NAMES,
    UNSEEN_NAMES,
    VALUES,
    held_out_values,
    is_held_out,
    training_values,
)

tasks = st.sampled_from(TASKS)
lengths = st.integers(SHORTEST_PROMPT, 3000)
seeds = st.integers(0, 10**6)


@given(task=tasks, length=lengths, seed=seeds, unseen_name=st.booleans())
def test_a_task_fits_its_length_and_holds_its_needle_once(
    task: str, length: int, seed: int, unseen_name: bool
) -> None:
    example = make_task(task, length, seed, unseen_name)
    ids = encode(example.messages)
    assert len(ids) == example.prompt_tokens
    assert 0 <= length - len(ids) <= 10
    needle = [token_ids()[piece] for piece in (f"{example.name} ", example.answer, ". ")]
    assert sum(ids[place : place + len(needle)] == needle for place in range(len(ids))) == 1
    assert example.messages[-1]["content"].count(f"{example.name} {example.answer}.") == 1


@given(task=tasks, length=lengths, seed=seeds, unseen_name=st.booleans())
def test_name_is_recorded_once_and_its_pairing_held_out(
    task: str, length: int, seed: int, unseen_name: bool
) -> None:
    example = make_task(task, length, seed, unseen_name)
    words = example.messages[-1]["content"].replace(".", "").split()
    assert words.count(example.name) == 2  # its record and the question
    assert (example.name in UNSEEN_NAMES) == unseen_name == example.unseen_name
    names = {*NAMES, *UNSEEN_NAMES}
    records = [(name, value) for name, value in pairwise(words) if name in names]
    assert len(records) == (1 if task == "single-needle" else len(set(records)))
    assert all(is_held_out(name, value) for name, value in records)


@given(task=tasks, length=lengths, seed=seeds)
def test_same_seed_same_task_other_seed_other_task(task: str, length: int, seed: int) -> None:
    assert make_task(task, length, seed) == make_task(task, length, seed)
    assert make_task(task, length, seed).messages != make_task(task, length, seed + 1).messages


@given(length=st.integers(64, 4096), seed=seeds, stretch=st.booleans())
def test_training_never_shows_a_held_out_pairing(length: int, seed: int, stretch: bool) -> None:
    sequence = chat_sequence(length, Random(seed), stretch)
    words = {index: piece for piece, index in token_ids().items()}
    values = set(VALUES)
    names = {*NAMES, *UNSEEN_NAMES}
    for first, second in pairwise(words.get(index, "") for index in sequence.ids):
        if second in values and first.strip() in names:
            assert not is_held_out(first.strip(), second)
    assert len(sequence.ids) <= length
    assert all(words[sequence.ids[index]] in values for index in sequence.answers)


@given(length=st.integers(64, 512), seed=seeds, symbols=st.sampled_from([0, 64]))
def test_copied_tokens_have_been_seen_before(length: int, seed: int, symbols: int) -> None:
    sequence = copy_sequence(length, symbols, Random(seed))
    assert sequence.answers
    assert all(sequence.ids[index] in sequence.ids[:index] for index in sequence.answers)


def test_stretched_positions_rise_and_stay_in_range() -> None:
    for seed in range(50):
        positions = chat_sequence(512, Random(seed), stretch=True).positions
        assert all(low < high for low, high in pairwise(positions))
        assert positions[-1] < 32768


def test_every_name_has_values_on_both_sides() -> None:
    for name in NAMES:
        assert held_out_values(name)
        assert training_values(name)
        assert not set(held_out_values(name)) & set(training_values(name))
    for name in UNSEEN_NAMES:
        assert not training_values(name)


def test_document_answers_its_questions() -> None:
    document = make_document(1000, seed=3)
    assert 990 <= document.tokens <= 1000
    assert len(document.records) > 20
    for name, value in document.records.items():
        assert f"{name} {value}." in document.text
        assert document.question(name).endswith(name)
        span = document.token_span(name)
        assert "".join(document.layout.pieces[span.start : span.end]) == f"{name} {value}. "
    with pytest.raises(KeyError):
        document.question(UNSEEN_NAMES[0])


def test_bad_requests_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="single-needle, multi-key-needle"):
        make_task("haystack", 512, 0)
    with pytest.raises(ValueError, match=str(SHORTEST_PROMPT)):
        make_task("single-needle", SHORTEST_PROMPT - 1, 0)
    with pytest.raises(ValueError, match="do not fit"):
        lay_out([("Alice", "copper")], 2, Random(0))
