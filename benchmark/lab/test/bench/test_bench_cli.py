"""`sgl-importance bench` around a stand-in for the harness: pairs, resume, fields, one line for a failure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sgl_importance_lab.bench import harness
from sgl_importance_lab.bench.bench_run import BenchError
from sgl_importance_lab.bench.cli import app

from support.chat_server import Reply, chat_server

HARNESS = '''#!{python}
"""Asks as lm-evaluation-harness would, and writes what it writes: an answer of "right" scores 1."""
import json, sys, urllib.request
from pathlib import Path

if sys.argv[1] == "-c":
    sys.exit(0)
call = json.loads(Path(sys.argv[2]).read_text())
length = call["metadata"].get("max_seq_lengths", [0])[0]
for file in Path(call["folders"][0]).glob("*.yaml"):  # a task with its questions from a user's file
    task = json.loads(file.read_text())
    assert Path(task["include"]).is_absolute()
    assert Path(task["dataset_kwargs"]["data_files"]["train"]).read_text() == "questions"
    assert task["dataset_path"] == "csv"
samples = {{}}
for task in call["tasks"]:
    for number in reversed(range(call["limit"])):
        prompt = f"{{task}} {{length}} {{number}}"
        sent = {{"model": call["model_args"]["model"], "prompt": prompt, "temperature": 0}}
        url = call["model_args"]["base_url"]
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(sent).encode())) as reply:
            text = json.load(reply)["choices"][0]["text"]
        row = {{"doc_id": number, "filter": "none", "prompt_hash": prompt, "filtered_resps": [text]}}
        scores = dict.fromkeys((str(length), "exact_match"), float(text == "right"))
        samples.setdefault(task, []).append({{**row, **scores}})
Path(sys.argv[3]).write_text(json.dumps(samples))
'''


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Arguments that name the stand-in and a tokenizer."""
    folder = tmp_path / "harness"
    (folder / "lib" / "python3" / "site-packages" / "lm_eval" / "tasks").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(HARNESS.format(python=sys.executable))
    python.chmod(0o755)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    return [
        "ruler",
        "--tokenizer",
        str(tmp_path),
        "--harness",
        str(folder),
        "--tasks",
        "ruler_vt",
        "--lengths",
        "1024",
    ]


def says(text: str, cached: int = 3) -> Reply:
    usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": cached}}
    return 200, json.dumps({"choices": [{"text": text}], "usage": usage}).encode()


def bench(words: list[str], *more: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [*words, *more])


def document(path: Path) -> Any:
    return json.loads(path.read_text())["runs"]


def test_two_servers_are_compared_prompt_by_prompt(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "runs.json"

    def worse(body: dict[str, Any]) -> Reply:
        return says("right" if body["prompt"].endswith(" 0") else "wrong")

    with chat_server(lambda _: says("right")) as first, chat_server(worse) as second:
        result = bench(words, "--url", first, "--compare", second, "--samples", "10", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert "30 of 100 prompt tokens cached" in result.stdout
    for text in ("-0.900", "9, 0", "0.004", "worse"):
        assert text in result.stdout
    runs = document(out)
    assert [run["parts"][0]["cached_tokens"] for run in runs] == [30, 30]
    samples = runs[1]["parts"][0]["samples"]
    assert [each["number"] for each in samples] == list(range(10))
    assert [each["score"] for each in samples] == [1.0] + [0.0] * 9
    assert not out.with_name("runs.json.part").exists()


def test_an_earlier_run_takes_a_server_s_place(words: list[str], tmp_path: Path) -> None:
    out, picture = tmp_path / "first.json", tmp_path / "quality.png"
    with chat_server(lambda _: says("right")) as first:
        assert bench(words, "--url", first, "--samples", "4", "--json", str(out)).exit_code == 0
    result = bench(words, "--url", str(out), "--compare", str(out), "--samples", "4", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "not told apart" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    refused = bench(words, "--url", str(tmp_path / "tokenizer_config.json"))
    assert refused.exit_code == 2
    assert "is no run of this command" in refused.stderr


def test_a_resumed_run_asks_only_what_is_missing(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "runs.json"
    asked: list[str] = []
    is_full = False

    def answer(body: dict[str, Any]) -> Reply:
        if is_full:
            return 503, b"full"
        asked.append(body["prompt"])
        return says("right")

    def full_after_three(body: dict[str, Any]) -> Reply:
        nonlocal is_full
        is_full = is_full or len(asked) == 3
        return answer(body)

    with chat_server(full_after_three) as url:
        arguments = [*words, "--url", url, "--samples", "5", "--json", str(out)]
        broken = bench(arguments)
        assert broken.exit_code == 2
        assert "answered: full" in broken.stderr
        before = list(asked)
        asked.clear()
        is_full = False
        assert bench(arguments, "--resume").exit_code == 0
    assert len(before) == 3
    assert sorted(before + asked) == [f"ruler_vt 1024 {number}" for number in range(5)]
    assert document(out)[0]["parts"][0]["prompt_tokens"] == 50


def test_a_run_interrupted_at_the_second_server_keeps_the_answers_of_the_first(
    words: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "runs.json"
    asked: list[str] = []
    is_full = True

    def first_answers(body: dict[str, Any]) -> Reply:
        asked.append(body["prompt"])
        return says("right")

    def second_answers(_: dict[str, Any]) -> Reply:
        return (503, b"full") if is_full else says("right")

    with chat_server(first_answers) as first, chat_server(second_answers) as second:
        arguments = [*words, "--url", first, "--compare", second, "--samples", "3", "--json", str(out)]
        assert bench(arguments).exit_code == 2
        assert len(asked) == 3
        is_full = False
        resumed = bench(arguments, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert len(asked) == 3, "the first server was asked again"
    assert [run["parts"][0]["prompt_tokens"] for run in document(out)] == [30, 30]


def test_a_server_beside_itself_is_asked_twice(words: list[str], tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(body: dict[str, Any]) -> Reply:
        asked.append(body["prompt"])
        return says("right")

    with chat_server(answer) as url:
        out = str(tmp_path / "runs.json")
        result = bench(words, "--url", url, "--compare", url, "--samples", "2", "--json", out)
    assert result.exit_code == 0, result.output
    assert len(asked) == 4


def test_answers_of_another_command_line_are_not_kept(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "runs.json"
    asked: list[str] = []

    def started(budget: float, seed: int) -> Reply:
        command = f"--port 1 --kv-sparse-selector bits --kv-sparse-budget={budget}"
        told = {"data": [{"id": "served"}], "launch_command": command, "random_seed": seed}
        return 200, json.dumps(told).encode()

    def answer(body: dict[str, Any]) -> Reply:
        asked.append(body["prompt"])
        return says("right") if len(asked) < 4 else (503, b"full")

    with chat_server(answer, started(0.1, 1)) as url:
        arguments = [*words, "--url", url, "--samples", "5", "--json", str(out)]
        assert bench(arguments).exit_code == 2
    port = int(url.rsplit(":", 1)[1])
    for budget, remaining in ((0.2, 5), (0.1, 2)):
        kept = out.with_name("runs.json.part").read_bytes()
        asked.clear()

        def again(body: dict[str, Any]) -> Reply:
            asked.append(body["prompt"])
            return says("right")

        with chat_server(again, started(budget, 2), port):
            assert bench(arguments, "--resume").exit_code == 0
        assert len(asked) == remaining
        assert (document(out)[0]["selector"], document(out)[0]["budget"]) == ("bits", budget)
        out.with_name("runs.json.part").write_bytes(kept)


def test_fields_reach_the_server_that_they_are_meant_for(words: list[str], tmp_path: Path) -> None:
    hints: list[Any] = []

    def answer(body: dict[str, Any]) -> Reply:
        hints.append(body.get("kv_hints"))
        return says("right")

    budget = '{"kv_hints": {"selector": "bits", "budget": 64}}'
    with chat_server(answer) as url:
        bodies = ["--body", '{"kv_hints": {"selector": "all"}}', "--compare-body", budget]
        result = bench(words, "--url", url, "--compare", url, "--samples", "1", *bodies)
    assert result.exit_code == 0, result.output
    assert hints == [{"selector": "all"}, {"selector": "bits", "budget": 64}]
    assert "served bits 64 less served all" in result.stdout


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9: start one"),
        (["--tokenizer", "nowhere"], "--tokenizer nowhere holds no tokenizer_config.json"),
        (["--harness", "nowhere"], "no lm-evaluation-harness in nowhere: add --install"),
        (["--tasks", "niah_single_2"], "unknown task 'niah_single_2': choose from niah_single_1"),
        (["--body", "[1]"], "--body takes a JSON object"),
        (["--body", '{"kv_hints": 3}'], "--body takes a JSON object such as"),
        (["--body", '{"kv_hints": {"budget": "half"}}'], "--body takes a JSON object such as"),
        (["--resume"], "--resume needs the --json file"),
        (["--plot", "x.doc"], "--plot cannot write 'x.doc'"),
    ],
)
def test_a_failure_is_one_line_with_its_cure(words: list[str], change: list[str], problem: str) -> None:
    with chat_server(lambda _: says("right")) as url:
        result = bench(words, "--url", url, *change)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"{}", b'{"choices": [], "usage": 3}'])
def test_an_answer_that_is_no_completion_is_one_line_and_not_kept(
    words: list[str], tmp_path: Path, answer: bytes
) -> None:
    out = tmp_path / "runs.json"
    with chat_server(lambda _: (200, answer)) as url:
        result = bench(words, "--url", url, "--samples", "1", "--json", str(out))
    assert result.exit_code == 2
    assert "does not answer like an OpenAI server: check the address" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not out.with_name("runs.json.part").exists()


def test_a_missing_tokenizer_and_an_unknown_suite(words: list[str]) -> None:
    with chat_server(lambda _: says("right")) as url:
        arguments = [*words[:1], *words[3:], "--url", url]
        assert "name its folder, --tokenizer" in bench(arguments).stderr
        unknown = bench(["mmlu", *arguments[1:]])
    assert "unknown suite 'mmlu': choose from ruler" in unknown.stderr


def test_questions_from_a_user_s_file(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("questions.csv").write_text("questions")
    with chat_server(lambda _: says("right")) as url:
        arguments = ["aime", "--url", url, "--harness", "harness", "--data", "questions.csv"]
        result = bench(arguments, "--json", "runs.json", "--samples", "3")
    assert result.exit_code == 0, result.output
    samples = document(Path("runs.json"))[0]["parts"][0]["samples"]
    assert [(each["task"], each["score"]) for each in samples] == [("aime24", 1.0)] * 3


@pytest.mark.parametrize(
    ("name", "tasks", "problem"),
    [
        ("questions.txt", "aime24", "give a file that ends in .csv"),
        ("questions.csv", "aime24,aime25", "--data holds one task's questions: name that one, --tasks"),
    ],
)
def test_data_that_no_task_can_read(
    words: list[str], tmp_path: Path, name: str, tasks: str, problem: str
) -> None:
    file = tmp_path / name
    file.write_text("")
    with chat_server(lambda _: says("right")) as url:
        result = bench(["aime", *words[1:5]], "--url", url, "--data", str(file), "--tasks", tasks)
    assert result.exit_code == 2
    assert problem in result.stderr


def test_what_another_harness_writes_is_refused() -> None:
    with pytest.raises(BenchError, match="does not write"):
        harness.read_samples(b'{"ruler_vt": [{"id": 1}]}', "ruler", 1024)


def test_of_two_filters_the_one_of_the_suite_counts() -> None:
    row = {"doc_id": 0, "prompt_hash": "p", "filtered_resps": ["(A)"]}
    rows = [
        {**row, "filter": "strict-match", "exact_match": 0.0},
        {**row, "filter": "flexible-extract", "exact_match": 1.0},
    ]
    written = json.dumps({"gpqa_diamond_cot_zeroshot": rows}).encode()
    (sample,) = harness.read_samples(written, "gpqa", 0)
    assert (sample.task, sample.score) == ("gpqa_diamond_cot_zeroshot", 1.0)


def test_the_pins_bring_no_torch() -> None:
    names = [line.partition("==")[0].lower() for line in harness.PINS.read_text().split()]
    assert "lm_eval" in names
    assert not {"torch", "torchvision", "torchaudio", "triton"} & set(names)
