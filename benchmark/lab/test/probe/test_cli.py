"""`sgl-importance probe` against small HTTP servers: right grades, and one clear line for every failure."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sgl_importance_lab.probe.chat_client import ServerError, task_group
from sgl_importance_lab.probe.cli import app
from sgl_importance_lab.probe.vocabulary import UNSEEN_NAMES

from support.chat_server import Reply, chat_server, completion


def _oracle(chat: dict[str, Any]) -> Reply:
    """Reads the record that the question names, but knows no name that training never paired."""
    text = chat["messages"][-1]["content"]
    name = text.rsplit(maxsplit=1)[1]
    found = re.search(rf"{name} (\w+)\.", text)
    assert found is not None
    return completion("  copper" if name in UNSEEN_NAMES else f" {found.group(1)}\n")


def _eval(base_url: str, *arguments: str) -> Result:
    command = ["eval", "--base-url", base_url, "--lengths", "128", "--n", "6", *arguments]
    return CliRunner().invoke(app, command)


def _assert_one_error_line(result: Result, *fragments: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for fragment in fragments:
        assert fragment in result.stderr


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_eval_grades_by_task_length_and_kind_of_name(tmp_path: Path, suffix: str) -> None:
    rows_file = tmp_path / "rows.json"
    with chat_server(_oracle) as base_url:
        result = _eval(base_url + suffix, "--lengths", "128,256", "--json", str(rows_file))
    assert result.exit_code == 0, result.output
    rows = json.loads(rows_file.read_text(encoding="utf-8"))
    assert [(row["task"], row["length"], row["unseen_names"]) for row in rows] == [
        (task, length, unseen)
        for task in ("single-needle", "multi-key-needle")
        for length in (128, 256)
        for unseen in (False, True)
    ]
    assert {row["n"] for row in rows} == {6}
    assert {row["exact_match"] for row in rows if not row["unseen_names"]} == {1.0}
    assert all(row["exact_match"] < 1.0 for row in rows if row["unseen_names"])
    assert "multi-key-needle" in result.stdout


def test_an_answer_with_more_than_the_value_is_wrong(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"

    def chatty(chat: dict[str, Any]) -> Reply:
        _, body = _oracle(chat)
        text = json.loads(body)["choices"][0]["message"]["content"]
        return completion(f"It is {text.strip()}")

    with chat_server(chatty) as base_url:
        result = _eval(base_url, "--json", str(rows_file))
    assert result.exit_code == 0, result.output
    assert {row["exact_match"] for row in json.loads(rows_file.read_text(encoding="utf-8"))} == {0.0}


def test_an_empty_answer_is_wrong_not_an_error() -> None:
    with chat_server(lambda _: completion(None)) as base_url:
        result = _eval(base_url)
    assert result.exit_code == 0, result.output
    assert "0.000" in result.stdout


def test_unreachablechat_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    _assert_one_error_line(_eval(f"http://127.0.0.1:{port}"), "no server answers", "--url")


@pytest.mark.parametrize(
    "models", [(404, b"not found"), (200, b"<html></html>"), (200, b"[]"), (200, b'{"data": []}')]
)
def test_url_of_something_else(models: Reply) -> None:
    with chat_server(_oracle, models) as base_url:
        _assert_one_error_line(_eval(base_url), "OpenAI-compatible", "--url")


@pytest.mark.parametrize("url", ["no-scheme:1", "ftp://127.0.0.1", "http://127.0.0.1:notaport", ""])
def test_no_url(url: str) -> None:
    _assert_one_error_line(_eval(url), "http://127.0.0.1:30000")


def test_refused_key() -> None:
    with chat_server(_oracle, (401, b"{}")) as base_url:
        _assert_one_error_line(_eval(base_url), "--api-key")


def test_prompt_that_the_server_refuses() -> None:
    with chat_server(lambda _: (400, b"longer than\nthe context")) as base_url:
        _assert_one_error_line(_eval(base_url), "400", "longer than the context")


def test_slowchat_server() -> None:
    stopped = threading.Event()

    def slow(_: dict[str, Any]) -> Reply:
        stopped.wait(60)
        return 500, b""

    with chat_server(slow) as base_url:
        try:
            _assert_one_error_line(_eval(base_url, "--timeout", "0.3"), "--timeout")
        finally:
            stopped.set()


def test_a_defect_beside_a_failed_request_is_not_hidden() -> None:
    async def fail(error: Exception) -> None:
        raise error

    async def both() -> None:
        async with task_group() as group:
            group.create_task(fail(ServerError("refused")))
            group.create_task(fail(ValueError("a defect")))

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(both())
    assert raised.value.subgroup(ValueError) is not None


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--tasks", "single-needle,haystack"], "haystack"),
        (["--tasks", ""], "single-needle"),
        (["--lengths", "short"], "--lengths"),
        (["--lengths", "8"], "at least"),
        (["--json", "no/such/directory/rows.json"], "create it"),
    ],
)
def test_bad_arguments(arguments: list[str], fragment: str) -> None:
    _assert_one_error_line(_eval("http://127.0.0.1:1", *arguments), fragment)


def test_prompt_prints_messages_and_answer() -> None:
    arguments = ["prompt", "--task", "single-needle", "--length", "200", "--seed", "5"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    prompt = json.loads(result.stdout)
    assert set(prompt) == {"messages", "answer"}
    assert f" {prompt['answer']}." in prompt["messages"][-1]["content"]
    assert result.stdout == CliRunner().invoke(app, arguments).stdout


@pytest.mark.parametrize(("task", "length"), [("haystack", "200"), ("single-needle", "3")])
def test_prompt_refuses_what_it_cannot_make(task: str, length: str) -> None:
    _assert_one_error_line(CliRunner().invoke(app, ["prompt", "--task", task, "--length", length]))
