"""The committed checkpoint: an ordinary Hugging Face Llama that retrieves records it was never trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_importance.embedded_model import checkpoint_path
from sgl_importance_lab.probe.model_config import probe_config, write_config
from sgl_importance_lab.probe.tasks import ProbeDocument, make_document, make_task
from sgl_importance_lab.probe.tokenizer import write_tokenizer
from sglang_importance.cpu.imports import TorchvisionOperators

torch = pytest.importorskip("torch")

PROMPTS = 48
MOST_BYTES = 20_000_000


def _make_transformers_importable() -> None:
    """Beside a CPU torch, a torchvision built for CUDA breaks transformers' imports without its shim."""
    shim = TorchvisionOperators()
    if shim.needed():
        shim.apply()


@pytest.fixture(scope="module")
def probe() -> tuple[Any, Any]:
    pytest.importorskip("transformers")
    _make_transformers_importable()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(checkpoint_path())


def _answers(probe: tuple[Any, Any], chats: list[list[dict[str, str]]]) -> list[str]:
    """Greedy answers; every one must end its turn by itself."""
    model, tokenizer = probe
    tokenizer.padding_side = "left"
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    batch.pop("token_type_ids", None)
    with torch.inference_mode():
        output = model.generate(**batch, max_new_tokens=4, do_sample=False)
    replies = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :])
    assert all("<|end|>" in reply for reply in replies)
    return [reply.split("<|end|>")[0] for reply in replies]


@pytest.mark.parametrize(("task", "unseen_name"), [("multi-key-needle", False), ("single-needle", False)])
def test_answers_pairings_never_seen_in_training(
    probe: tuple[Any, Any], task: str, unseen_name: bool
) -> None:
    examples = [make_task(task, 512, 1000 + seed, unseen_name) for seed in range(PROMPTS)]
    answers = _answers(probe, [example.messages for example in examples])
    right = sum(answer == example.answer for answer, example in zip(answers, examples, strict=True))
    assert right / PROMPTS >= 0.98


def test_answer_follows_the_record_not_the_name(probe: tuple[Any, Any]) -> None:
    """The same prompt with another value in the needle gets that other value."""
    example = make_task("multi-key-needle", 512, 7)
    other = next(value for value in ("marble", "banjo") if value != example.answer)
    changed = [
        {
            **message,
            "content": message["content"].replace(
                f"{example.name} {example.answer}.", f"{example.name} {other}."
            ),
        }
        for message in example.messages
    ]
    assert _answers(probe, [example.messages, changed]) == [example.answer, other]


def _assert_right(
    probe: tuple[Any, Any], document: ProbeDocument, chats: list[list[dict[str, str]]], names: list[str]
) -> None:
    assert _answers(probe, chats) == [document.records[name] for name in names]


def test_several_questions_about_one_document_and_later_turns(probe: tuple[Any, Any]) -> None:
    document = make_document(512, seed=11)
    names = list(document.records)[:6]
    _assert_right(probe, document, [document.messages(name) for name in names], names)
    later = [
        [
            *document.messages(names[0]),
            {"role": "assistant", "content": document.records[names[0]]},
            {"role": "user", "content": document.question(name)},
        ]
        for name in names[1:]
    ]
    _assert_right(probe, document, later, names[1:])


def test_checkpoint_is_what_this_code_writes_and_small(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write_config(tmp_path, probe_config())
    for expected in tmp_path.iterdir():
        assert (checkpoint_path() / expected.name).read_bytes() == expected.read_bytes(), expected.name
    assert sum(file.stat().st_size for file in checkpoint_path().iterdir()) <= MOST_BYTES
    record = json.loads((checkpoint_path() / "training.json").read_text(encoding="utf-8"))
    assert record["finished"]
    assert record["exact_match"]["multi-key-needle"]["2048"] >= 0.98


def test_training_decoder_computes_what_transformers_computes(probe: tuple[Any, Any]) -> None:
    from decoder_training.decoder import Decoder
    from safetensors.torch import load_file

    model, _ = probe
    decoder = Decoder(probe_config())
    decoder.load_state_dict(load_file(checkpoint_path() / "model.safetensors"))
    ids = torch.randint(0, probe_config().vocabulary, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours = decoder.lm_head(decoder(ids, torch.arange(300).expand(2, -1)))
        theirs = model(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
