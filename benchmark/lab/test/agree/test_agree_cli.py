"""`sgl-importance agree` between servers that are not sglang, and one clear line for every failure."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sgl_importance_lab.agree.cli import app

from support.chat_server import Reply, chat_server, completion


def says(*steps: dict[str, float]) -> Reply:
    """An answer whose tokens are the likeliest of each step, by their shares."""
    content: list[dict[str, Any]] = []
    for shares in steps:
        logprobs = {token: math.log(share) for token, share in shares.items()}
        top = [{"token": token, "logprob": value} for token, value in logprobs.items()]
        best = max(logprobs, key=logprobs.__getitem__)
        content.append({"token": best, "logprob": logprobs[best], "top_logprobs": top})
    choice = {"message": {"content": ""}, "logprobs": {"content": content}}
    return 200, json.dumps({"choices": [choice]}).encode()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    record = {"messages": [{"role": "user", "content": "Bruno?"}]}
    file.write_text((json.dumps(record) + "\n") * 2)
    return file


def run(prompts: Path, first: str, second: str, *arguments: str) -> Result:
    words = [str(prompts), "--url", first, "--compare", second, *arguments]
    return CliRunner().invoke(app, words)


def test_free_answers_are_compared_up_to_the_first_difference(prompts: Path) -> None:
    sure, other = {"a": 0.9, "b": 0.1}, {"a": 0.2, "b": 0.8}
    out = prompts.with_name("rows.json")
    with (
        chat_server(lambda _: says(sure, sure, sure)) as first,
        chat_server(lambda _: says(sure, other, sure)) as second,
    ):
        done = run(prompts, first, second, "--json", str(out))
    assert done.exit_code == 0, done.output
    assert "greedy answers of both, up to the first difference" in " ".join(done.stdout.split())
    divergence = 0.9 * math.log(0.9 / 0.2) + 0.1 * math.log(0.1 / 0.8)
    for row in json.loads(out.read_text())["prompts"]:
        assert (row["compared"], row["equal"], row["first_difference"]) == (2, 1, 1)
        assert row["divergence"] == pytest.approx(divergence)


class Died(BaseException):
    """The process is gone: no handler of ours runs."""


def test_a_run_that_dies_in_a_write_keeps_the_prompts_before(
    prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    out = prompts.with_name("rows.json")
    write_text = Path.write_text

    def second_is_half(path: Path, text: str, **named: Any) -> int:
        if len(asked) == 2 and path.parent == out.parent:
            write_text(path, text[: len(text) // 2], **named)
            raise Died
        return write_text(path, text, **named)

    def answer(body: Any) -> Reply:
        asked.append(body)
        return says({"a": 1.0})

    with chat_server(answer) as first, chat_server(lambda _: says({"a": 1.0})) as second:
        monkeypatch.setattr(Path, "write_text", second_is_half)
        with pytest.raises(Died):
            run(prompts, first, second, "--json", str(out))
        assert len(asked) == 2
        done = run(prompts, first, second, "--json", str(out), "--resume")
    assert done.exit_code == 0, done.output
    assert [row["line"] for row in json.loads(out.read_text())["prompts"]] == [1, 2]
    assert len(asked) == 3, "the first prompt was asked again"


def test_rows_of_other_prompts_or_servers_are_not_mixed(prompts: Path) -> None:
    out = prompts.with_name("rows.json")
    resumed = ("--json", str(out), "--resume")
    with chat_server(lambda _: says({"a": 1.0})) as first, chat_server(lambda _: says({"a": 1.0})) as second:
        assert run(prompts, first, second, *resumed).exit_code == 0
        whole = json.loads(out.read_text())
        other = {"messages": [{"role": "user", "content": "Clara?"}]}
        for field, value, problem in (
            ("models", ["served", "another"], "was written of other models: serve those"),
            ("how", "forced", "of servers with other flags, which are compared in another way"),
        ):
            out.write_text(json.dumps({**whole, field: value}))
            refused = run(prompts, first, second, *resumed)
            assert (refused.exit_code, problem in refused.stderr) == (2, True), refused.output
            assert refused.stderr.count("\n") == 1
        out.write_text(json.dumps(whole))
        prompts.write_text(json.dumps(other) + "\n")
        refused = run(prompts, first, second, *resumed)
    assert refused.exit_code == 2
    assert "was written of other prompts: give those, or name another file" in refused.stderr
    assert json.loads(out.read_text()) == whole


def test_rows_behind_the_limit_do_not_count(prompts: Path) -> None:
    out = prompts.with_name("rows.json")
    resumed = ("--json", str(out), "--resume")
    with chat_server(lambda _: says({"a": 1.0})) as first, chat_server(lambda _: says({"a": 1.0})) as second:
        assert run(prompts, first, second, *resumed).exit_code == 0
        done = run(prompts, first, second, *resumed, "--limit", "1")
        assert done.exit_code == 0, done.output
        assert "1 prompts" in done.stdout
        assert [row["line"] for row in json.loads(out.read_text())["prompts"]] == [1]
        again = run(prompts, first, second, *resumed)
    assert again.exit_code == 0, again.output
    assert [row["line"] for row in json.loads(out.read_text())["prompts"]] == [1, 2]


@pytest.mark.parametrize(
    ("content", "answer", "fragment"),
    [
        ('{"messages": [{"role": "user", "content": "Bruno?"}]}', completion("lantern"), "gives no logprobs"),
        ('{"no": "prompt"}', says({"a": 1.0}), "needs exactly one of messages, prompt and input"),
        ("", says({"a": 1.0}), "holds no request"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    tmp_path: Path, content: str, answer: Reply, fragment: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with chat_server(lambda _: answer) as url:
        done = run(file, url, url)
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert fragment in done.stderr
