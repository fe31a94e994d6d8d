"""The trained models themselves, where `scripts/get_model.py` has fetched them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from real_models.cache import is_whole
from real_models.catalogue import MODELS

CACHE = Path(__file__).parents[2] / ".cache" / "models"


def loaded(name: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = CACHE / name
    if not is_whole(folder, MODELS[name]):
        pytest.skip(f"not fetched: python scripts/get_model.py {name}")
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32"
    )


@pytest.mark.nightly
def test_smollm2_answers_and_ends() -> None:
    tokenizer, model = loaded("smollm2")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**ids, max_new_tokens=30)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.nightly
def test_gemma3_goes_on_in_english() -> None:
    tokenizer, model = loaded("gemma3-270m")
    text = "The capital of France is"
    ids = tokenizer(text, return_tensors="pt")
    assert ids["input_ids"].tolist() == [[2, 818, 5279, 529, 7001, 563]]
    assert tokenizer.decode(ids["input_ids"][0], skip_special_tokens=True) == text
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, 6:]
    assert tokenizer.decode(answer).startswith(" the capital of the country of France.")
