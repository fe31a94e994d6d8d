"""Layers that find a planted answer: which are chosen, and that they are seen as a server sees them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from typer.testing import CliRunner

from sgl_importance_lab.conformance.page_scores import PageScores, layer_page_scores
from sgl_importance_lab.trained_model.decoder import Decoder, Prefill
from sgl_importance_lab.trained_model.decoder_shape import Shape
from sgl_importance_lab.trained_model.layer_choice import CalibrationError, calibrate
from sgl_importance_lab.trained_model.layers_command import app
from sgl_importance_lab.trained_model.planted_questions import (
    MOST_OBSERVED,
    PAGE,
    SIGNAL,
    Question,
    ask_document,
)
from sgl_importance_lab.workload.real_text import Documents, TextShape, read_text, text_at_hand

from support.models import TINY_LLAMA, write_tiny_llama

PAGES, LAYERS = 40, 4


def made(page: int, looks: list[list[int]], *, is_answered: bool = True) -> Question:
    """Each observed token of a layer looks at one page: ``looks[layer]``, the prompt's last token last."""
    scores = []
    for pages in looks:
        body = torch.zeros(MOST_OBSERVED, PAGES)
        body[torch.arange(MOST_OBSERVED), pages] = 0.5
        scores.append(PageScores(body, body, body))
    return Question(is_answered, page, dict(enumerate(scores)))


def questions(count: int, *, is_answered: bool = True) -> list[Question]:
    """Layer 1 finds every answer; layer 2 with the prompt's last token only; layers 0 and 3 never do."""
    found = []
    for page in range(10, 10 + count):
        elsewhere = [(page + 1 + at) % PAGES for at in range(MOST_OBSERVED)]
        # Five pages of more weight than the answer's, by all tokens but the last.
        late = [*([30 + at % 6 if at < 30 else 0 for at in range(MOST_OBSERVED - 1)]), page]
        looks = [[0] * MOST_OBSERVED, [page] * MOST_OBSERVED, late, [elsewhere[0]] * MOST_OBSERVED]
        found.append(made(page, looks, is_answered=is_answered))
    return found


def test_the_layers_that_find_the_answer_are_chosen_with_the_window_that_shows_it() -> None:
    found = calibrate([*questions(12), *questions(5, is_answered=False)], beside=[0, 3])
    assert (found.asked, found.answered) == (17, 12)
    by_window = {each.window: each for each in found.windows}
    assert by_window[1].chosen == [1, 2]
    assert by_window[MOST_OBSERVED].chosen == [1]
    assert [share.value for share in by_window[1].by_layer] == [0.0, 1.0, 1.0, 0.0]
    assert by_window[1].together.value == 1.0
    assert by_window[1].beside is not None
    assert by_window[1].beside.value == 0.0
    assert found.best.window == MOST_OBSERVED, "the widest of equals"


def test_a_model_that_cannot_answer_has_no_calibration() -> None:
    with pytest.raises(CalibrationError, match=r"answers 9 of 29 questions, and 10 are needed"):
        calibrate([*questions(9), *questions(20, is_answered=False)])


def random_weights() -> dict[str, torch.Tensor]:
    width, inner, dim = (TINY_LLAMA[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = TINY_LLAMA["num_attention_heads"], TINY_LLAMA["num_key_value_heads"]
    shapes = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (heads * dim, width),
        "self_attn.k_proj": (kv_heads * dim, width),
        "self_attn.v_proj": (kv_heads * dim, width),
        "self_attn.o_proj": (width, heads * dim),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    draws = torch.Generator().manual_seed(0)
    layers = range(TINY_LLAMA["num_hidden_layers"])
    named = {f"model.layers.{at}.{name}.weight": shape for at in layers for name, shape in shapes.items()}
    named |= {"model.norm.weight": (width,), "model.embed_tokens.weight": (TINY_LLAMA["vocab_size"], width)}
    return {name: 0.3 * torch.randn(shape, generator=draws) for name, shape in named.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([read_text(text_at_hand()[:1])], trainer)
    write_tiny_llama(folder)
    save_file(random_weights(), folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_question_behind_a_shared_text_is_scored_as_if_read_alone(model: Path) -> None:
    decoder, tokenizer = Decoder(model), Tokenizer.from_file(str(model / "tokenizer.json"))
    shape = TextShape(documents=1, document_tokens=300, records=3)
    documents = Documents(read_text(text_at_hand()[:1]), tokenizer, shape, 0)
    with torch.inference_mode():
        asked = list(ask_document(decoder, tokenizer, documents, 0))
        for question, request in zip(asked, documents.all_records(0), strict=True):
            ids = tokenizer.encode(request.prompt).ids
            alone = Prefill(decoder, torch.tensor(ids), keeps_queries=True)
            for layer, scores in question.scores.items():
                expected = layer_page_scores(
                    alone.queries[layer, -MOST_OBSERVED:],
                    alone.keys[layer],
                    torch.arange(len(ids) - MOST_OBSERVED, len(ids)),
                    scale=decoder.shape.dim**-0.5,
                    page_size=PAGE,
                    sink_tokens=SIGNAL.sink_tokens,
                    local_tokens=SIGNAL.local_tokens,
                )
                torch.testing.assert_close(scores.body, expected.body, rtol=1e-3, atol=1e-5)
            number = tokenizer.decode(ids[PAGE * question.page : PAGE * (question.page + 2)])
            assert request.answer.strip()[0] in number


def test_the_command_says_why_it_has_no_answer(model: Path, tmp_path: Path) -> None:
    few = ["--documents", "1", "--document-tokens", "256", "--records", "2"]
    result = CliRunner().invoke(app, [str(model), *few])
    assert result.exit_code == 2
    assert "answers 0 of 2 questions" in result.output
    result = CliRunner().invoke(app, [str(model), "--beside", "9"])
    assert result.exit_code == 2
    assert "has layers 0 to" in result.output
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert result.exit_code == 2
    assert "no config.json" in result.output


def test_a_config_without_grouped_heads_and_theta_has_those_of_the_first_llama(tmp_path: Path) -> None:
    config: dict[str, Any] = dict(TINY_LLAMA)
    del config["num_key_value_heads"], config["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = Shape.of(tmp_path)
    assert (shape.kv_heads, shape.theta) == (shape.heads, 10_000.0)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"{", "config.json cannot be read ("),
        ("config.json", b"[]", "config.json holds no JSON object: "),
        ("config.json", b'{"model_type": "llama"}', "config.json lacks num_attention_heads: "),
        (
            "config.json",
            json.dumps({**TINY_LLAMA, "vocab_size": "many"}).encode(),
            "config.json is no config of a model (",
        ),
        (
            "config.json",
            json.dumps({**TINY_LLAMA, "num_hidden_layers": 3}).encode(),
            "no *.safetensors holds model.layers.2.input_layernorm.weight: ",
        ),
        ("model.safetensors", b"\x08\0\0\0\0\0\0\0{", "model.safetensors cannot be read ("),
    ],
)
def test_a_damaged_model_is_one_line(
    model: Path, tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    damaged = shutil.copytree(model, tmp_path / "damaged")
    (damaged / file).write_bytes(content)
    result = CliRunner().invoke(app, [str(damaged)])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.endswith(": copy or download the model again\n")
    assert result.stderr.count("\n") == 1


def test_numbers_that_are_no_layers_are_one_line(model: Path) -> None:
    result = CliRunner().invoke(app, [str(model), "--beside", "all"])
    assert (result.exit_code, "--beside takes numbers of layers" in result.stderr) == (2, True)


def test_prompts_longer_than_the_model_s_context_are_refused(model: Path, tmp_path: Path) -> None:
    short = shutil.copytree(model, tmp_path / "short")
    (short / "config.json").write_text(json.dumps({**TINY_LLAMA, "max_position_embeddings": 256}))
    few = ["--documents", "1", "--document-tokens", "256", "--records", "2"]
    result = CliRunner().invoke(app, [str(short), *few])
    assert result.exit_code == 2, result.output
    assert "the model was made for 256: lower --document-tokens" in result.stderr
