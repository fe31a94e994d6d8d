"""Coding-agent sessions and dialogues through the ``openai`` client, streaming."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.served import script_server
from support.servers import ServerProcess
from support.workloads import real_input

pytestmark = pytest.mark.server

FLAGS = (
    *("--page-size", "16", "--max-total-tokens", "24576"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
)
ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer, and how many prompt tokens the server found in its cache."""

    text: str
    prompt_tokens: int
    cached_tokens: int


def read(stream: Any) -> Answer:
    """Reads a stream of completions or of chat completions to its end."""
    text, usage = "", None
    for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            text += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
    assert usage is not None
    details = usage.prompt_tokens_details
    return Answer(text, usage.prompt_tokens, details.cached_tokens if details else 0)


def converse(server: ServerProcess) -> list[list[Answer]]:
    """Every session and dialogue, turn by turn; answers are not fed back, so each server sees the same."""
    client = server.openai_client()
    common: dict[str, Any] = {
        "model": server.name,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        # An answer that ends at once would compare nothing.
        "extra_body": {"ignore_eos": True},
    }
    sessions = [
        [read(client.completions.create(prompt=prompt, **common)) for prompt in session]
        for session in real_input.sessions()
    ]
    dialogues = [
        [
            read(client.chat.completions.create(messages=messages, **common))
            for messages in real_input.turns_of(dialogue)
        ]
        for dialogue in real_input.dialogues()
    ]
    return sessions + dialogues


def test_real_conversations_grow_on_their_prefix_and_answer_as_stock(probe_model: Path):
    with script_server("--kv-policy", "default", *FLAGS, model=probe_model) as stock:
        expected = converse(stock)
        unknown = stock.chat([{"role": "user", "content": "Bruno"}], max_tokens=2, kv_hints={"keep": True})
    assert "kv_importance" not in unknown["usage"]
    with script_server("--kv-policy", "importance", *FLAGS, model=probe_model) as server:
        answers = converse(server)
        nodes = server.get("/kv_importance", limit=1000)["nodes"]
    assert [[a.text for a in turns] for turns in answers] == [[a.text for a in turns] for turns in expected]
    for turns in answers:
        cached = [answer.cached_tokens for answer in turns]
        assert cached == sorted(set(cached)), f"cached tokens do not grow: {cached}"
        assert all(answer.cached_tokens < answer.prompt_tokens for answer in turns)
        # What was asked before is found again, but for the template tokens behind it.
        for before, after in itertools.pairwise(turns):
            assert after.cached_tokens > 0.7 * before.prompt_tokens
    scored = [node for node in nodes if node["queries"] > 0]
    print(f"{sum(map(len, answers))} answers, {len(nodes)} nodes, {len(scored)} with scores")
    assert len(scored) > len(answers)
    assert any(node["self_mass"] > 0 for node in scored)
    assert any(node["cross_mass"] > 0 for node in scored)
