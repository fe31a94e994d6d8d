"""The committed checkpoints: ordinary Hugging Face Llamas, one of which thinks before it answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmark.reasoning_windows import load_model, replies
from sgl_importance_lab.probe.model_config import write_config
from sgl_importance_lab.reasoner import control_path, reasoner_path
from sgl_importance_lab.reasoner.cli import app
from sgl_importance_lab.reasoner.evaluate import Grade, grade
from sgl_importance_lab.reasoner.model_config import reasoner_config
from sgl_importance_lab.reasoner.tasks import ReasoningTask, make_task
from sgl_importance_lab.reasoner.tokenizer import reasoner_tokenizer

from support.served import script_server

torch = pytest.importorskip("torch")

MOST_BYTES = 24_000_000
LEARNT = ("search", "state")


@pytest.fixture(scope="module")
def reasoner() -> Any:
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    return load_model(reasoner_path())


def grades(model: Any, tasks: list[ReasoningTask], window: int | None = None) -> list[Grade]:
    found = replies(model, tasks, window, lambda: None)
    return [grade(task, {"content": reply}) for task, reply in zip(tasks, found, strict=True)]


@pytest.mark.parametrize("task", LEARNT)
def test_it_thinks_to_the_right_answer_and_must_look_back_for_it(reasoner: Any, task: str) -> None:
    """Instances that training never drew; then the same, seeing the prompt and the last 16 tokens alone."""
    asked = [make_task(task, 160, 500 + number) for number in range(8)]
    whole, cut_off = grades(reasoner, asked), grades(reasoner, asked, window=16)
    assert sum(each.right for each in whole) >= 7
    assert sum(each.steps_right == 1 for each in whole) >= 7
    assert sum(each.steps_right == 1 for each in cut_off) <= 1


def test_the_control_answers_without_a_thought() -> None:
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    asked = [make_task("search", 64, 500 + number) for number in range(8)]
    found = replies(load_model(control_path()), asked, None, lambda: None)
    assert not any("<think>" in reply for reply in found)
    lengths = [len(reply.split()) for reply in found]
    assert max(lengths) <= 2 * max(len(task.answer.split()) for task in asked)


@pytest.mark.parametrize(("path", "thinks"), [(reasoner_path, True), (control_path, False)])
def test_a_checkpoint_is_what_this_code_writes_and_small(tmp_path: Path, path: Any, thinks: bool) -> None:
    reasoner_tokenizer().write(tmp_path)
    write_config(tmp_path, reasoner_config())
    for expected in tmp_path.iterdir():
        assert (path() / expected.name).read_bytes() == expected.read_bytes(), expected.name
    assert sum(file.stat().st_size for file in path().iterdir()) <= MOST_BYTES
    record = json.loads((path() / "training.json").read_text(encoding="utf-8"))
    assert record["finished"]
    assert record["thinks"] is thinks
    assert record["seconds"] <= 2 * 3600


@pytest.mark.server
def test_a_server_of_it_is_graded(tmp_path: Path) -> None:
    """The command of the guide, beside a server whose parser takes the thought out of the message."""
    rows_file = tmp_path / "rows.json"
    with script_server("--reasoning-parser", "qwen3", model=reasoner_path()) as server:
        words = ["eval", "--url", server.base_url, "--tasks", "search", "--lengths", "256", "--n", "2"]
        result = CliRunner().invoke(app, [*words, "--json", str(rows_file)])
        body = {"messages": make_task("search", 256, 0).messages, "model": server.name, "temperature": 0}
        message = server.post("/v1/chat/completions", body)["choices"][0]["message"]
    assert result.exit_code == 0, result.output
    (row,) = json.loads(rows_file.read_text(encoding="utf-8"))
    assert (row["exact_match"], row["steps_right"]) == (1, 1)
    assert message["reasoning_content"].startswith("visit ")
    assert message["content"].strip() == make_task("search", 256, 0).answer
