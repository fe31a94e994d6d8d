"""Requests of real text: their answers stand where they say, and follow the prompt rightly."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from typer.testing import CliRunner

from sgl_importance_lab.workload.cli import app
from sgl_importance_lab.workload.real_text import (
    KINDS,
    TextShape,
    make_text_workload,
    model_tokenizer,
    read_text,
    text_at_hand,
)
from sgl_importance_lab.workload.workload_request import WorkloadError, read_requests

SHAPE = TextShape(documents=3, document_tokens=200, records=4)


@pytest.fixture(scope="module")
def text() -> str:
    return read_text(text_at_hand()[:1])


@pytest.fixture(scope="module", params=["no beginning", "a beginning"])
def model(request: pytest.FixtureRequest, text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer, trained on the text; of one kind a text begins with a token."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text],
        BpeTrainer(vocab_size=800, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False),
    )
    if request.param == "a beginning":
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_stands_in_the_prompt_where_the_request_says(model: Path, text: str, kind: str) -> None:
    tokenizer = model_tokenizer(model)
    requests = list(make_text_workload(text, tokenizer, [kind], 30, shape=SHAPE, seed=1))
    assert len({request.prompt for request in requests}) > 5
    for request in requests:
        ids = tokenizer.encode(request.prompt).ids
        at = request.answer_position()
        assert at is not None
        assert at < len(ids) - 1
        found = tokenizer.decode(ids[at : at + request.max_tokens + 1])
        assert found.strip().startswith((request.answer or "?")[:3])
        # A model that goes on with so many tokens of the right text is graded as right.
        behind = tokenizer.encode(f"{request.prompt} {request.answer}").ids[len(ids) :]
        expected = len(behind) if kind == "records" else SHAPE.answer_tokens
        assert abs(request.max_tokens - expected) <= (kind == "repeats")


def test_a_record_is_asked_for_by_the_beginning_of_its_sentence(model: Path, text: str) -> None:
    for request in make_text_workload(text, model_tokenizer(model), ["records"], 10, shape=SHAPE):
        *_, question = request.prompt.splitlines()
        assert request.prompt.count(f"{question} {request.answer}.") == 1


def test_a_repeat_is_cut_off_before_its_answer(model: Path, text: str) -> None:
    for request in make_text_workload(text, model_tokenizer(model), ["repeats"], 10, shape=SHAPE):
        cue = request.prompt.rpartition("\n\n")[2]
        assert cue
        assert (request.answer or "?") in request.prompt


def test_the_same_seed_makes_the_same_requests(model: Path, text: str) -> None:
    tokenizer = model_tokenizer(model)

    def made(seed: int) -> list[object]:
        return list(make_text_workload(text, tokenizer, list(KINDS), 12, shape=SHAPE, seed=seed))

    assert made(3) == made(3) != made(4)


def test_the_command_writes_what_run_reads(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "requests"
    words = [
        "text",
        str(out),
        "--model",
        str(model),
        "--count",
        "6",
        "--documents",
        "2",
        "--document-tokens",
        "128",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert {request.kind for request in read_requests(out)} <= set(KINDS)
    assert all(request.answer_position() for request in read_requests(out))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "{empty}"], "no tokenizer.json in"),
        (["--model", "{model}", "--text", "{short}"], "give more in --text"),
        (["--model", "{model}", "--text", "{binary}"], "--text takes files in UTF-8"),
        (["--model", "{model}", "--kinds", "chats"], "unknown kind chats"),
        (["--model", "{model}", "--records", "99"], "--records takes 1 to"),
    ],
)
def test_bad_input_is_one_line(model: Path, tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "short").write_text("Too short.")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    places = {"empty": tmp_path, "model": model, "short": tmp_path / "short", "binary": tmp_path / "binary"}
    result = CliRunner().invoke(
        app, ["text", str(tmp_path / "out"), *(word.format(**places) for word in words)]
    )
    assert result.exit_code == 2
    (line,) = result.output.strip().splitlines()
    assert message in line


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(WorkloadError, match=r"tokenizer\.json.*--model takes the folder"):
        model_tokenizer(tmp_path)
