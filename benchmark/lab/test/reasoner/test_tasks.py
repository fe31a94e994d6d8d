"""The reasoning tasks: sized by tokens, deterministic, their right thoughts right by independent means."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance_lab.probe.word_tokenizer import BEGIN
from sgl_importance_lab.reasoner.program import Program
from sgl_importance_lab.reasoner.search import Search
from sgl_importance_lab.reasoner.tasks import (
    FEWEST_TOKENS,
    MOST_TOKENS,
    TASKS,
    draw_task,
    make_task,
    read_prompt,
)
from sgl_importance_lab.reasoner.thought import BadPrompt
from sgl_importance_lab.reasoner.tokenizer import reasoner_tokenizer, render

tasks = st.sampled_from(TASKS)
searches = st.sampled_from(["search", "state"])
lengths = st.integers(FEWEST_TOKENS, 700)
seeds = st.integers(0, 10**6)


@given(task=tasks, length=lengths, seed=seeds)
def test_a_thought_has_the_length_asked_for_in_single_tokens(task: str, length: int, seed: int) -> None:
    instance = make_task(task, length, seed)
    pieces = instance.solution.thought.pieces
    assert length - max(11, 0.15 * length) <= len(pieces) <= length
    ids = reasoner_tokenizer().ids
    assert reasoner_tokenizer().encode(instance.thought) == [ids[piece] for piece in pieces]
    prompt = render(instance.messages)
    assert len(reasoner_tokenizer().encode(prompt)) == len(instance.prompt.split()) + 3
    assert prompt.startswith(BEGIN)


@pytest.mark.parametrize("task", TASKS)
def test_the_longest_thought_can_be_had(task: str) -> None:
    assert len(make_task(task, MOST_TOKENS[task], 0).solution.thought.pieces) >= 0.85 * MOST_TOKENS[task]


@pytest.mark.parametrize("task", TASKS)
def test_every_short_thought_can_be_had(task: str) -> None:
    """Of a state none has 31 to 36 tokens; to be asked for 36 was to wait for ever."""
    for length in range(FEWEST_TOKENS, 64):
        pieces = make_task(task, length, 0).solution.thought.pieces
        assert length - max(7, 0.15 * length) <= len(pieces) <= length


@given(task=tasks, length=lengths, seed=seeds)
def test_same_seed_same_task_other_seed_other_task(task: str, length: int, seed: int) -> None:
    assert make_task(task, length, seed) == make_task(task, length, seed)
    assert make_task(task, length, seed).prompt != make_task(task, length, seed + 1).prompt


@given(task=tasks, length=lengths, seed=seeds)
def test_a_prompt_says_all_of_its_problem(task: str, length: int, seed: int) -> None:
    instance = make_task(task, length, seed)
    assert read_prompt(instance.prompt) == instance.problem


@given(length=lengths, seed=seeds)
def test_a_program_comes_to_what_python_computes(length: int, seed: int) -> None:
    instance = make_task("program", length, seed)
    program = instance.problem
    assert isinstance(program, Program)
    values: dict[str, int] = dict(program.inputs)
    for line in program.lines:
        values[line.target] = (values[line.left] + values[line.right]) % 10
    assert instance.answer == str(values[program.asked])
    stated = [(name, value) for name, value in pairwise(instance.thought.split()) if value.isdecimal()]
    assert len(stated) == 3 * len(program.lines) + 1
    assert all(values[name] == int(value) for name, value in stated)


@given(task=searches, length=lengths, seed=seeds)
def test_a_search_enters_nodes_once_and_in_depth_first_order(task: str, length: int, seed: int) -> None:
    instance = make_task(task, length, seed)
    search = instance.problem
    assert isinstance(search, Search)
    order: list[str] = []

    def enter(node: str) -> bool:
        """Plain recursion, without a thought; True once the goal is entered."""
        order.append(node)
        if node == search.goal:
            return True
        return any(enter(other) for other in search.neighbours[node] if other not in order)

    assert enter(search.start)
    entered = [step.pieces[1].strip() for step in instance.solution.thought.steps if step.kind == "visit"]
    assert entered == order


@given(length=lengths, seed=seeds)
def test_a_path_leads_from_the_goal_to_the_start(length: int, seed: int) -> None:
    instance = make_task("search", length, seed)
    search = instance.problem
    assert isinstance(search, Search)
    path = instance.answer.split()
    assert (path[0], path[-1]) == (search.goal, search.start)
    assert all(one in search.neighbours[other] for one, other in pairwise(path))


@given(task=tasks, length=lengths, seed=seeds)
def test_a_look_back_finds_what_is_read_at_its_latest_mention(task: str, length: int, seed: int) -> None:
    thought = make_task(task, length, seed).solution.thought
    pieces = thought.pieces
    assert thought.look_backs
    for look_back in thought.look_backs:
        token, source = look_back.token, look_back.source
        if look_back.kind == "seen":
            assert pieces[source] == pieces[token - 1]
            assert pieces[source] not in pieces[source + 1 : token - 1]
        else:
            # `Ada 3` or `Ada from Bea`: the same words before what is read.
            before = 1 if task == "program" else 2
            assert pieces[source - before : source + 1] == pieces[token - before : token + 1]
            facts = [
                pieces[index : index + before + 1] for index in range(source - before + 1, token - before)
            ]
            assert pieces[token - before : token + 1] not in facts
        assert look_back.distance >= 0


@pytest.mark.parametrize(
    ("task", "tokens", "message"),
    [
        ("riddle", 100, "program, search, state"),
        ("program", FEWEST_TOKENS - 1, str(FEWEST_TOKENS)),
        ("search", MOST_TOKENS["search"] + 1, str(MOST_TOKENS["search"])),
    ],
)
def test_bad_requests_say_what_is_allowed(task: str, tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_task(task, tokens, Random(0))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "begins with"),
        ("What is the time ?", "begins with"),
        ("Program : Ada 3 .", "Sums"),
        ("Program : Ada 3 . Sums : BELLA Ada Ada .", "Order"),
        ("Program : Ada 30 . Sums : Order : . Question : Ada ?", "Ada 30"),
        ("Program : Ada 3 . Sums : ADA Ada Ada . Order : ADA . Question : Ada ?", "no line"),
        ("Program : Ada 3 . Sums : BELLA Carl Ada . Order : BELLA . Question : Ada ?", "needs Carl"),
        ("Program : Ada 3 . Sums : BELLA Ada . Order : BELLA . Question : Ada ?", "cut off"),
        ("Program : Ada 3 . Sums : BELLA Ada Ada . Order : . Question : Ada ?", "order"),
        ("Program : Ada 3 . Sums : Order : . Question : Bella ?", "does not ask"),
        ("Graph : ADA Bella . Question : Ada to Bella path ?", "no record of Bella"),
        ("Graph : Ada Bella . Question : Ada to Ada path ?", "no record of a graph"),
        ("Graph : ADA Ada . BELLA Question : Ada to Ada path ?", "cut off"),
        ("Graph : ADA Ada . Question : Ada ?", "no question"),
    ],
)
def test_a_text_that_is_no_prompt(prompt: str, message: str) -> None:
    with pytest.raises(BadPrompt, match=message):
        read_prompt(prompt)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("Graph : ADA . BELLA . Question : Ada to Bella path ?", "cannot be reached"),
        ("Graph : ADA Bella . BELLA Ada . CARL . Question : Ada to Bella before Carl ?", "not entered"),
    ],
)
def test_a_search_without_an_answer(prompt: str, message: str) -> None:
    with pytest.raises(BadPrompt, match=message):
        read_prompt(prompt).solve()
