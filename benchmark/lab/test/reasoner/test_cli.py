"""`sgl-importance reason` against small HTTP servers: right grades, and one clear line for every failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sgl_importance_lab.reasoner.cli import app
from sgl_importance_lab.reasoner.tasks import TASKS, make_task, read_prompt
from sgl_importance_lab.reasoner.verify import verify

from support.chat_server import Reply, chat_server, completion


def _eval(base_url: str, *arguments: str) -> Result:
    command = ["eval", "--base-url", base_url, "--lengths", "64", "--n", "4", *arguments]
    return CliRunner().invoke(app, command)


def _solved(chat: dict[str, Any]) -> tuple[str, str]:
    solution = read_prompt(chat["messages"][-1]["content"]).solve()
    return solution.thought.text, solution.answer


def _inline(chat: dict[str, Any]) -> Reply:
    thought, answer = _solved(chat)
    return completion(f"<think>{thought}</think>{answer} ")


def _parsed(chat: dict[str, Any]) -> Reply:
    """As a server with a reasoning parser answers."""
    thought, answer = _solved(chat)
    return completion(f"{answer} ", reasoning_content=thought)


def _without_thought(chat: dict[str, Any]) -> Reply:
    return completion(_solved(chat)[1])


def _half_right(chat: dict[str, Any]) -> Reply:
    """Goes wrong in the last step of the thought, and in the answer."""
    thought, _ = _solved(chat)
    words = thought.split()
    return completion(f"<think>{' '.join(words[:-1])} wrong </think>wrong")


def _endless(chat: dict[str, Any]) -> Reply:
    """Reached its limit of tokens in the thought."""
    return completion(f"<think>{_solved(chat)[0]}")


@pytest.mark.parametrize(
    ("answer", "exact_match", "steps_right"),
    [
        (_inline, 1.0, (1.0, 1.0)),
        (_parsed, 1.0, (1.0, 1.0)),
        (_without_thought, 1.0, (0.0, 0.0)),
        (_half_right, 0.0, (0.5, 0.99)),
        (_endless, 0.0, (1.0, 1.0)),
    ],
)
def test_eval_grades_answers_and_steps(
    tmp_path: Path, answer: Any, exact_match: float, steps_right: tuple[float, float]
) -> None:
    rows_file = tmp_path / "rows.json"
    with chat_server(answer) as base_url:
        result = _eval(base_url, "--lengths", "64,150", "--json", str(rows_file))
    assert result.exit_code == 0, result.output
    rows = json.loads(rows_file.read_text(encoding="utf-8"))
    assert [(row["task"], row["length"], row["n"]) for row in rows] == [
        (task, length, 4) for task in TASKS for length in (64, 150)
    ]
    for row in rows:
        assert row["exact_match"] == exact_match
        assert steps_right[0] <= row["steps_right"] <= steps_right[1]
        assert sum(row["first_wrong"].values()) == (0 if steps_right == (1.0, 1.0) else 4)
    assert f"{exact_match:.3f}" in result.stdout


def test_eval_publishes_how_far_right_thoughts_look_back(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    with chat_server(_inline) as base_url:
        result = _eval(base_url, "--tasks", "program", "--lengths", "600", "--json", str(rows_file))
    assert result.exit_code == 0, result.output
    (row,) = json.loads(rows_file.read_text(encoding="utf-8"))
    thoughts = [make_task("program", 600, seed).solution.thought for seed in range(4)]
    found = {table["kind"]: table for table in row["look_backs"]}
    assert set(found) == {look_back.kind for thought in thoughts for look_back in thought.look_backs}
    operands = found["operand"]
    distances = [
        look_back.distance
        for thought in thoughts
        for look_back in thought.look_backs
        if look_back.kind == "operand"
    ]
    assert operands["per_thought"] == len(distances) / 4
    assert sum(operands["up_to"].values()) == len(distances)
    assert operands["up_to"]["256"] == sum(128 < distance <= 256 for distance in distances) > 0


def test_the_limit_of_tokens_leaves_room_for_the_thought() -> None:
    limits = []

    def note(chat: dict[str, Any]) -> Reply:
        limits.append((chat["max_tokens"], len(_solved(chat)[0].split())))
        return _inline(chat)

    with chat_server(note) as base_url:
        assert _eval(base_url).exit_code == 0
    assert all(limit > 2 * thought for limit, thought in limits)


def _assert_one_error_line(result: Result, *fragments: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for fragment in fragments:
        assert fragment in result.stderr


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--tasks", "program,riddle"], "riddle"),
        (["--tasks", ""], "program, search, state"),
        (["--lengths", "long"], "--lengths"),
        (["--lengths", "8"], "8"),
        (["--lengths", "100000"], "100000"),
        (["--json", "no/such/directory/rows.json"], "create it"),
    ],
)
def test_bad_arguments(arguments: list[str], fragment: str) -> None:
    _assert_one_error_line(_eval("http://127.0.0.1:1", *arguments), fragment)


@pytest.mark.parametrize("body", [b"[]", b'{"choices": [{"message": {"content": 7}}]}'])
def test_url_of_something_else(body: bytes) -> None:
    with chat_server(lambda _: (200, body)) as base_url:
        _assert_one_error_line(_eval(base_url), "OpenAI-compatible", "--url")


def test_prompt_prints_messages_thought_and_answer() -> None:
    arguments = ["prompt", "--task", "state", "--length", "200", "--seed", "5"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    prompt = json.loads(result.stdout)
    assert set(prompt) == {"messages", "thought", "answer"}
    assert verify(prompt["messages"][-1]["content"], prompt["thought"]).first_wrong is None
    assert result.stdout == CliRunner().invoke(app, arguments).stdout


@pytest.mark.parametrize(("task", "length"), [("riddle", "200"), ("search", "3")])
def test_prompt_refuses_what_it_cannot_make(task: str, length: str) -> None:
    _assert_one_error_line(CliRunner().invoke(app, ["prompt", "--task", task, "--length", length]))
