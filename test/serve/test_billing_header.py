"""The line with which Claude Code begins its system prompts does not reach the prompt under importance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.http.requests.billing_header import HOOKS, TARGET, without_header
from sglang_importance.upstream.server_options import attach_options

from support.servers import ServerProcess

HEADER = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={:05x};"


def request_with(system: Any) -> AnthropicMessagesRequest:
    messages = [{"role": "user", "content": "Bruno"}]
    return AnthropicMessagesRequest(model="m", max_tokens=1, system=system, messages=messages)


def blocks(*texts: str) -> Any:
    return request_with([{"type": "text", "text": text} for text in texts]).system


@pytest.mark.parametrize(
    ("system", "rest"),
    [
        (f"{HEADER}\nYou are an agent.", "You are an agent."),
        ("You are an agent.", "You are an agent."),
        (f"Quote: {HEADER}", f"Quote: {HEADER}"),
        (HEADER, ""),
        (None, None),
    ],
)
def test_only_a_header_in_front_goes(system: str | None, rest: str | None):
    assert without_header(system) == rest


def test_a_block_with_nothing_else_goes_and_others_stay():
    agent = "You are an agent."
    assert without_header(blocks(HEADER, agent)) == blocks(agent)
    assert without_header(blocks(f"{HEADER}\nYou are", agent)) == blocks("You are", agent)
    assert without_header(blocks(agent, HEADER)) == blocks(agent, HEADER)
    assert without_header([]) == []


@pytest.mark.parametrize(
    ("policy", "is_stripped"), [("importance", True), ("observe", False), ("default", False)]
)
def test_it_goes_under_importance_alone_and_the_request_stays_as_it_was(policy: Any, is_stripped: bool):
    arguments = SimpleNamespace()
    attach_options(arguments, ImportanceOptions(policy=policy))
    chat = SimpleNamespace(tokenizer_manager=SimpleNamespace(server_args=arguments))
    serving = SimpleNamespace(openai_serving_chat=chat)
    request = request_with(HEADER + "\nA")
    around, _ = HOOKS[TARGET]
    converted = around(lambda _, passed: passed.system, serving, request)
    assert converted == ("A" if is_stripped else HEADER + "\nA")
    assert request.system == HEADER + "\nA"


@pytest.mark.server
def test_a_hash_that_changes_costs_no_hit_and_no_tokens(server: ServerProcess):
    def usage(hash_of_turn: int | None) -> tuple[int, int]:
        texts = ["Alice copper. Bruno lantern. David marble. Edith ladder. " * 8]
        if hash_of_turn is not None:
            texts.insert(0, HEADER.format(hash_of_turn))
        system = [{"type": "text", "text": text} for text in texts]
        messages = [{"role": "user", "content": "Question: Bruno"}]
        prompt = {"model": server.name, "system": system, "messages": messages}
        counted = server.post("/v1/messages/count_tokens", prompt)["input_tokens"]
        used = server.post("/v1/messages", prompt | {"max_tokens": 2})["usage"]
        assert counted == used["input_tokens"] + used.get("cache_read_input_tokens", 0)
        return counted, used.get("cache_read_input_tokens", 0)

    without, _ = usage(None)
    for turn in range(3):
        counted, read = usage(0x1000 + turn)
        assert counted == without
        assert read >= counted - 16
