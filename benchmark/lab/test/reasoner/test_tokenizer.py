"""The reasoner's tokenizer: marks of a thought stay in the text, both encoders and both templates agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sgl_importance_lab.probe.word_tokenizer import ASSISTANT, END
from sgl_importance_lab.reasoner.tasks import TASKS, make_task
from sgl_importance_lab.reasoner.tokenizer import (
    CHAT_TEMPLATE,
    END_OF_THOUGHT,
    THINK,
    reasoner_tokenizer,
    render,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    reasoner_tokenizer().write(directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@given(text=st.text())
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_ids_are_dense(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == reasoner_tokenizer().size
    assert sorted(tokenizer.get_vocab().values()) == list(range(reasoner_tokenizer().size))


@pytest.mark.parametrize("task", TASKS)
def test_plain_encoder_agrees_with_the_served_tokenizer(tokenizer: Tokenizer, task: str) -> None:
    for seed in range(5):
        instance = make_task(task, 200, seed)
        text = render(instance.messages) + instance.reply + END
        assert reasoner_tokenizer().encode(text) == tokenizer.encode(text).ids


def test_marks_of_a_thought_stay_where_special_tokens_are_left_out(tokenizer: Tokenizer) -> None:
    reply = make_task("search", 100, 0).reply
    ids = tokenizer.encode(ASSISTANT + reply + END).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == reply


def test_chat_template_renders_what_the_tasks_assume(tmp_path: Path) -> None:
    jinja2 = pytest.importorskip("jinja2")
    reasoner_tokenizer().write(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == CHAT_TEMPLATE
    messages = [
        {"role": "system", "content": " Think. "},
        {"role": "user", "content": "Program : "},
        {"role": "assistant", "content": f"{THINK}Ada 3 {END_OF_THOUGHT}3 "},
        {"role": "user", "content": "Graph :"},
    ]
    for add_generation_prompt in (False, True):
        rendered = jinja2.Template(CHAT_TEMPLATE).render(
            messages=messages, add_generation_prompt=add_generation_prompt
        )
        assert rendered == render(messages, add_generation_prompt)
        assert "Ada" not in rendered, "the thought of an earlier turn is left out"
