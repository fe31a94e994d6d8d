"""Bodies of requests as prompts for our routes: what changes their prompt or their namespace is refused."""

from __future__ import annotations

import json

import pytest
import typer

from sgl_importance.cli.request_body import fields_of_body
from sgl_importance.cli.why_command import prompt_of

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("model", ["base:adapter", "/models/base: adapter:2"])
def test_an_adapter_in_the_model_s_name_is_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """sglang's OpenAI routes take it for ``lora_path``."""
    with pytest.raises(typer.Exit) as ended:
        fields_of_body("--messages", {"model": model, "messages": MESSAGES})
    assert ended.value.exit_code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--messages: the adapter in model changes what the request finds in the cache" in line
    assert "leave it out, or give the token ids and the extra_key" in line


@pytest.mark.parametrize("model", ["base", "base:", None, 7])
def test_a_model_without_one_is_taken(model: object) -> None:
    assert fields_of_body("--messages", {"model": model, "messages": MESSAGES}) == {"messages": MESSAGES}


@pytest.mark.parametrize(("prompt", "name"), [("a", "text"), ([1, 2], "input_ids")])
def test_why_takes_the_prompt_of_a_completion(prompt: str | list[int], name: str) -> None:
    assert prompt_of(json.dumps({"prompt": prompt, "max_tokens": 1}), "tenant", None) == {
        name: prompt,
        "cache_salt": "tenant",
    }
