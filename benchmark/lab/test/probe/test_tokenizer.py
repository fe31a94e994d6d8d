"""The probe's tokenizer: any text survives, words of the language are single tokens, both encoders agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sgl_importance_lab.probe.tasks import make_task
from sgl_importance_lab.probe.tokenizer import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    encode,
    render,
    token_ids,
    vocabulary_size,
    write_tokenizer,
)
from sgl_importance_lab.probe.vocabulary import NAMES, UNSEEN_NAMES, VALUES, word_pieces


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@given(text=st.text())
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@given(words=st.lists(st.sampled_from(sorted(word_pieces())), max_size=30))
def test_words_of_the_language_between_other_text_survive(tokenizer: Tokenizer, words: list[str]) -> None:
    text = "¡" + "—".join(words)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_names_and_values_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert len(NAMES) + len(UNSEEN_NAMES) >= 200
    for name in (*NAMES, *UNSEEN_NAMES):
        assert tokenizer.encode(name).ids == [token_ids()[name]]
        assert tokenizer.encode(f"{name} ").ids == [token_ids()[f"{name} "]]
        record = tokenizer.encode(f"{name} {VALUES[0]}. ").ids
        assert record == [token_ids()[f"{name} "], token_ids()[VALUES[0]], token_ids()[". "]]


def test_ids_are_dense_and_words_disjoint(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == vocabulary_size()
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocabulary_size()))


def test_other_text_falls_back_to_bytes(tokenizer: Tokenizer) -> None:
    first_byte = len(SPECIAL_TOKENS)
    assert tokenizer.encode("Zoë").ids == [first_byte + byte for byte in "Zoë".encode()]


@pytest.mark.parametrize("task", ["single-needle", "multi-key-needle"])
def test_plain_encoder_agrees_with_the_served_tokenizer(tokenizer: Tokenizer, task: str) -> None:
    for seed in range(5):
        example = make_task(task, 512, seed)
        messages = [
            *example.messages,
            {"role": "assistant", "content": example.answer},
            {"role": "user", "content": "Question: Alice"},
        ]
        assert encode(messages) == tokenizer.encode(render(messages)).ids


@given(text=st.text(st.characters(max_codepoint=126), min_size=1))
@example(text="0\x1f:")
def test_plain_encoder_agrees_on_any_ascii(tokenizer: Tokenizer, text: str) -> None:
    messages = [{"role": "user", "content": text}]
    assert encode(messages) == tokenizer.encode(render(messages)).ids


def test_chat_template_renders_what_the_tasks_assume() -> None:
    jinja2 = pytest.importorskip("jinja2")
    messages = [
        {"role": "system", "content": " Read the notes. "},
        {"role": "user", "content": "Question: Alice"},
        {"role": "assistant", "content": "copper"},
        {"role": "user", "content": "Question: Basil\n"},
    ]
    for add_generation_prompt in (False, True):
        rendered = jinja2.Template(CHAT_TEMPLATE).render(
            messages=messages, add_generation_prompt=add_generation_prompt
        )
        assert rendered == render(messages, add_generation_prompt)


def test_tokenizer_config_holds_the_chat_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == CHAT_TEMPLATE
