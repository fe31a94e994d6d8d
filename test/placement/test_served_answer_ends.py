"""A real server sees how its answers end: by tokens, by what its HTTP process parses, by sglang's reasons."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from sgl_importance.observe.trace import open_trace
from sgl_importance.observe.trace.arrivals import arrivals
from sgl_importance.observe.trace.records import RequestAdmitted, RequestFinished
from sgl_importance_lab.probe.tasks import Message, make_document
from sgl_importance_lab.probe.tokenizer import encode

from support.servers import ServerProcess
from support.waiting import wait_until

pytestmark = pytest.mark.server

MARKER = "<|python_tag|>"  # of calls in the format of llama3, which may also do without


@dataclass(frozen=True)
class Served:
    """A server whose model says MARKER instead of one word.

    Attributes:
        word: that the model says MARKER for.
        calls: a question that the word answers.
        plain: questions about texts without it.
    """

    server: ServerProcess
    word: str
    calls: list[Message]
    plain: list[list[Message]]
    recording: Path

    def end_after(self, messages: list[Message]) -> str:
        """Of the last node that holds the question."""
        found = self.server.post("/kv_importance/find", {"input_ids": encode(messages)})
        end: str = self.server.get(f"/kv_importance/node/{found['path'][-1]['id']}")["answer_end"]
        return end


@pytest.fixture(scope="module")
def served(probe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    calling = make_document(300, 5)
    name, word = next(iter(calling.records.items()))
    others = [document for seed in range(6, 20) if word not in (document := make_document(300, seed)).text]
    model, recording = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("recording")
    shutil.copytree(probe_model, model, dirs_exist_ok=True)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[MARKER] = vocabulary.pop(word)
    token = {**tokenizer["added_tokens"][0], "id": vocabulary[MARKER], "content": MARKER}
    tokenizer["added_tokens"].append(token)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    flags = ("--kv-policy", "importance", "--page-size", "16", "--tool-call-parser", "llama3")
    with ServerProcess(*flags, "--kv-importance-trace", str(recording), model=model) as server:
        plain = [document.messages(next(iter(document.records))) for document in others]
        yield Served(server, word, calling.messages(name), plain, recording)


def test_a_marker_is_a_call_at_once(served: Served) -> None:
    prompt = encode(served.calls)
    reply = served.server.generate(prompt, max_new_tokens=4)
    assert len(reply["output_ids"]) < 4, "the model stops by itself"
    assert served.end_after(served.calls) == "tool_call"
    served.server.generate(encode(served.plain[0]), max_new_tokens=4)
    assert served.end_after(served.plain[0]) == "unknown", "without a marker it may have been JSON"
    served.server.generate(prompt, max_new_tokens=1)
    assert served.end_after(served.calls) == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_chats_are_parsed_and_told(served: Served, stream: bool) -> None:
    messages = served.plain[1 + stream]
    answer = served.server.openai_client().chat.completions.create(
        model=served.server.name, messages=messages, max_tokens=16, temperature=0, stream=stream
    )
    last = list(answer)[-1] if stream else answer
    assert last.choices[0].finish_reason == "stop"
    wait_until(lambda: served.end_after(messages) == "end_of_turn")
    rid = last.id

    def recorded() -> list[str]:
        """None where it is not written yet."""
        return [each.answer_end for each in arrivals(open_trace(served.recording)) if each.rid == rid]

    wait_until(lambda: recorded() == ["end_of_turn"])


def anthropic(served: Served, messages: list[Message], stream: bool, **more: Any) -> str:
    """The ``stop_reason`` of ``/v1/messages``."""
    system, *others = messages
    body = {"model": served.server.name, "system": system["content"], "messages": others, "temperature": 0}
    answer = httpx.post(
        f"{served.server.base_url}/v1/messages", json={**body, "stream": stream, **more}, timeout=60
    ).raise_for_status()
    if not stream:
        reason: str = answer.json()["stop_reason"]
        return reason
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if "{" in line]
    (reason,) = [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"]
    return reason


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_messages_are_parsed_and_told(served: Served, stream: bool) -> None:
    messages = served.plain[4 + stream]
    assert anthropic(served, messages, stream, max_tokens=16) == "end_turn"
    wait_until(lambda: served.end_after(messages) == "end_of_turn")
    assert anthropic(served, messages, stream, max_tokens=1) == "max_tokens"
    wait_until(lambda: served.end_after(messages) == "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_marker_is_a_call_on_anthropics_route(served: Served, stream: bool) -> None:
    # The word of the answer is written as the marker, so that the text of the question has its token, too.
    system, question = served.calls
    written: Message = {"role": "user", "content": question["content"].replace(served.word, MARKER)}
    anthropic(served, [system, written], stream, max_tokens=1)
    assert served.end_after(served.calls) == "length"
    anthropic(served, [system, written], stream, max_tokens=4)
    wait_until(lambda: served.end_after(served.calls) == "tool_call")


def test_a_hint_overrides_the_tokens(served: Served) -> None:
    served.server.chat(served.plain[3], kv_hints={"answer_end": "tool_call"})
    assert served.end_after(served.plain[3]) == "tool_call"


def test_a_recording_holds_what_the_tokens_said(served: Served) -> None:
    reply = served.server.generate(encode(served.calls), max_new_tokens=4)

    def ends() -> list[str]:
        records = list(open_trace(served.recording))
        numbers = {
            record.request
            for record in records
            if isinstance(record, RequestAdmitted) and record.rid == reply["meta_info"]["id"]
        }
        return [r.answer_end for r in records if isinstance(r, RequestFinished) and r.request in numbers]

    wait_until(ends)
    assert ends() == ["tool_call"]
