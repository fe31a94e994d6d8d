"""Hints and reports through the real routes and the real ``openai`` client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from benchmark.serving.passes import count_in_order
from benchmark.serving.workloads import load_parameters, make_workload
from sgl_importance_lab.probe.tasks import make_document

from support.servers import ServerProcess

pytestmark = pytest.mark.server

PAGE_SIZE = 16
DOCUMENT_TOKENS = 400  # a fifth of the pool: what a hint says decides who stays


@pytest.fixture
def server(hinting: ServerProcess) -> ServerProcess:
    hinting.flush_cache()
    return hinting


def _messages(seed: int, question: int = 0) -> list[dict[str, str]]:
    document = make_document(DOCUMENT_TOKENS, seed)
    return document.messages(list(document.records)[question])


def _chat(server: ServerProcess, seed: int, question: int = 0, **hints: Any) -> dict[str, Any]:
    """The report of a chat request about a document."""
    answer = server.chat(_messages(seed, question), max_tokens=4, kv_hints={"report": True, **hints})
    report: dict[str, Any] = answer["usage"]["kv_importance"]
    assert report["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    return report


def _fill(server: ServerProcess, seeds: range) -> None:
    for seed in seeds:
        server.chat(_messages(seed), max_tokens=4)


# ---- the answer ----


def test_the_openai_client_gets_a_report_where_it_asks_for_one(server: ServerProcess) -> None:
    client = server.openai_client()
    chat = {"model": server.name, "messages": _messages(1), "max_tokens": 4, "temperature": 0}
    stock = client.chat.completions.create(**chat)
    asked = client.chat.completions.create(**chat, extra_body={"kv_hints": {"report": True}})
    assert "kv_importance" not in stock.usage.model_dump()
    cached = asked.usage.prompt_tokens_details.cached_tokens
    assert cached == asked.usage.prompt_tokens // PAGE_SIZE * PAGE_SIZE
    assert asked.usage.kv_importance == {
        "prompt_tokens": asked.usage.prompt_tokens,
        "hit_tokens": {"device": cached, "host": 0, "storage": 0},
        "missed_tokens": {"short": asked.usage.prompt_tokens - cached},
        "missed": [
            {"reason": "short", "start": cached, "tokens": asked.usage.prompt_tokens - cached},
        ],
        "parted": None,
        "lost_tokens": 0,
        "lost": [],
        "hints": {},
    }
    # But for the report and what tells every answer from another, they are the same.
    without = asked.model_dump()
    del without["usage"]["kv_importance"]
    other = {"id": asked.id, "created": asked.created}
    assert without == {**stock.model_dump(), **other, "usage": without["usage"]}
    assert asked.choices == stock.choices


def _said(chunks: list[Any]) -> dict[str, list[Any]]:
    """Every field of the choices of a stream's chunks: texts joined, of other fields the values in order."""
    said: dict[str, list[Any]] = {}
    for chunk in chunks:
        (choice,) = chunk.choices
        fields = choice.model_dump()
        fields.update(fields.pop("delta", {}))
        for name, value in fields.items():
            values = said.setdefault(name, [])
            if name in ("text", "content") and values and value is not None and values[-1] is not None:
                values[-1] += value
            elif value not in values:
                values.append(value)
    return said


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_stream_ends_with_the_report(server: ServerProcess, route: str) -> None:
    client = server.openai_client()
    body: dict[str, Any] = {"model": server.name, "max_tokens": 4, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if route == "chat":
        create, prompt = client.chat.completions.create, {"messages": _messages(2)}
    else:
        create, prompt = client.completions.create, {"prompt": "Alice copper. " * 40}
    stock = list(create(**body, **prompt))
    asked = list(create(**body, **prompt, extra_body={"kv_hints": {"report": True}}))
    assert not any("kv_importance" in (chunk.usage or chunk).model_dump() for chunk in stock)
    *chunks, last = asked
    assert all(chunk.usage is None for chunk in chunks)
    # A busy server may send two tokens in one chunk: what the chunks say together is the same.
    assert _said(chunks) == _said(stock[:-1])
    assert last.usage.kv_importance["hit_tokens"]["device"] > 0


def test_a_report_for_each_prompt_of_a_batch(server: ServerProcess) -> None:
    prompts = ["Alice copper. " * 20, "Bruno lantern. " * 30]
    answer = server.openai_client().completions.create(
        model=server.name, prompt=prompts, n=2, max_tokens=2, extra_body={"kv_hints": {"report": True}}
    )
    tokens = [report["prompt_tokens"] for report in answer.usage.kv_importance]
    assert sum(tokens) == answer.usage.prompt_tokens
    assert tokens[0] < tokens[1]


def test_the_native_route_takes_and_gives_the_same(server: ServerProcess) -> None:
    body = {"text": "Clara compass. " * 20, "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    stock = server.post("/generate", body)["meta_info"]
    actions = [
        {
            "action_id": "1",
            "action_type": "sgl_importance.report",
            "action_version": "1",
            "payload": {"value": True},
        },
        {"action_id": "2", "action_type": "elsewhere.tier", "action_version": "9", "payload": {}},
    ]
    envelope = {"protocol_version": "1", "message_id": "m", "actions": actions}
    for hints in ({"report": True}, envelope):
        meta_info = server.post("/generate", {**body, "kv_hints": hints})["meta_info"]
        assert meta_info.keys() == stock.keys() | {"kv_importance"}
        details = meta_info["cached_tokens_details"]
        assert details == {"device": meta_info["cached_tokens"], "host": 0}
        assert meta_info["kv_importance"]["hit_tokens"]["device"] == details["device"] > 0
    first, second = server.post(
        "/generate",
        {**body, "text": [body["text"], "Emil anchor. "], "kv_hints": [None, {"report": True}]},
    )
    assert "kv_importance" not in first["meta_info"]
    assert "kv_importance" in second["meta_info"]


def test_hints_may_stand_as_text_in_openai_s_metadata(server: ServerProcess) -> None:
    client = server.openai_client()
    chat = {"model": server.name, "messages": _messages(1), "max_tokens": 2}
    told = client.chat.completions.create(**chat, metadata={"kv_hints": '{"report": true}', "other": "{"})
    assert told.usage.kv_importance["prompt_tokens"] == told.usage.prompt_tokens
    # Of two, the field counts: a gateway that carries it carries both.
    both = client.chat.completions.create(
        **chat, metadata={"kv_hints": '{"report": true}'}, extra_body={"kv_hints": {}}
    )
    assert "kv_importance" not in both.usage.model_dump()
    for text in ("{", {"report": True}, "[" * 100_000):
        refused = httpx.post(
            f"{server.base_url}/v1/chat/completions",
            json={**chat, "metadata": {"kv_hints": text}},
            trust_env=False,
        )
        assert refused.status_code == 400
        assert "metadata.kv_hints: Input should be JSON in a text" in refused.text


def test_lost_tokens_are_told_with_when_and_why(server: ServerProcess) -> None:
    assert _chat(server, 30)["lost_tokens"] == 0
    _fill(server, range(31, 37))
    report = _chat(server, 30)
    whole_pages = report["prompt_tokens"] // PAGE_SIZE * PAGE_SIZE
    assert report["lost_tokens"] == whole_pages - report["hit_tokens"]["device"] > 0
    parts = report["lost"]  # its tail went first, and what was left of it later
    assert sum(part["tokens"] for part in parts) == report["lost_tokens"]
    assert {(part["tier"], part["reason"]) for part in parts} == {("device", "least_loss")}
    assert [1 <= part["requests_ago"] <= 6 and part["loss"] > 0 for part in parts] == [True] * len(parts)


# ---- effects ----


def test_what_is_dropped_goes_first_and_what_is_shared_stays(server: ServerProcess) -> None:
    _fill(server, range(40, 43))
    # Nothing of this one is its own: all whole pages were known before.
    assert not _chat(server, 40, drop_after_use=True)["hints"]["drop_after_use"]["applied"]
    dropped = _chat(server, 43, drop_after_use=True)["hints"]["drop_after_use"]
    assert dropped == {"applied": True, "tokens": DOCUMENT_TOKENS}
    _fill(server, range(44, 45))  # a fifth document needs the place of one of the four
    assert [_chat(server, seed)["lost_tokens"] for seed in (44, 42, 41, 40)] == [0, 0, 0, 0]
    report = _chat(server, 43)
    assert report["lost_tokens"] == DOCUMENT_TOKENS
    assert [lost["reason"] for lost in report["lost"]] == ["dropped_after_use"]


def test_what_is_retained_survives_a_scan_within_the_budget_of_pins(server: ServerProcess) -> None:
    retained = _chat(server, 50, retain={"ttl_seconds": 600})["hints"]["retain"]
    assert retained["applied"]
    (pin,) = server.get("/kv_importance/pins")["pins"]
    try:
        assert pin["pin_id"] == retained["pin_id"]
        assert 500 < pin["expires_in_seconds"] <= 600
        assert retained["tokens"] == pin["granted_tokens"]["device"] > 0
        _fill(server, range(51, 71))
        assert _chat(server, 50)["hit_tokens"]["device"] >= retained["tokens"]
        # Asking again prolongs the one pin.
        _chat(server, 50, retain={"ttl_seconds": 900})
        (again,) = server.get("/kv_importance/pins")["pins"]
        assert again["expires_in_seconds"] > 600
    finally:
        for held in server.get("/kv_importance/pins")["pins"]:
            server.post("/kv_importance/unpin", {"pin_id": held["pin_id"]})


def test_prefetch_brings_the_prompt_and_generates_nothing(server: ServerProcess) -> None:
    messages = _messages(60)
    answer = server.chat(messages, max_tokens=9, kv_hints={"prefetch": True, "report": True})
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["kv_importance"]["hints"] == {"prefetch": {"applied": True}}
    then = server.chat(messages, max_tokens=9)
    whole_pages = then["usage"]["prompt_tokens"] // PAGE_SIZE * PAGE_SIZE
    assert then["usage"]["prompt_tokens_details"]["cached_tokens"] == whole_pages
    native = server.post("/generate", {"text": "Emil anchor. " * 20, "kv_hints": {"prefetch": True}})
    assert native["meta_info"]["completion_tokens"] == 0


def test_messages_name_their_tokens(server: ServerProcess) -> None:
    messages = _messages(70)
    assert [message["role"] for message in messages] == ["system", "user"]
    document = {"type": "document", "messages": -1}
    labelled = _chat(server, 70, block_types=[{"type": "system", "messages": 0}, document])
    assert labelled["hints"]["block_types"]["applied"]
    turns = [
        *messages,
        {"role": "assistant", "content": "copper"},
        {"role": "user", "content": " ".join(str(number) for number in range(60))},
    ]
    answer = server.chat(
        turns,
        max_tokens=2,
        kv_hints={"report": True, "block_types": [{"type": "tool_output", "messages": -1}]},
    )
    report = answer["usage"]["kv_importance"]
    # The last message is about what the cache did not know; a page at each end may belong to neither.
    new = report["prompt_tokens"] - report["hit_tokens"]["device"]
    assert abs(report["hints"]["block_types"]["tokens"] - new) <= 2 * PAGE_SIZE


def test_what_the_serving_benchmark_counts_is_what_was_cached(server: ServerProcess) -> None:
    requests = make_workload("documents", load_parameters()).requests[:16]
    row = count_in_order(server, requests)
    assert (row["requests"], row["exact_match"]) == (16, None)
    assert row["prompt_tokens"] == sum(len(request.token_ids()) for request in requests)
    assert 0 < row["device_hit_tokens"] == row["prompt_tokens"] - row["uncached_tokens"]
    assert row["evicted_tokens"] > 0
    assert row["host_hit_tokens"] == row["storage_hit_tokens"] == 0


# ---- refusals ----


@pytest.mark.parametrize(
    ("hints", "field"),
    [
        (7, "kv_hints"),
        ({"keep": True}, "kv_hints.keep"),
        ({"retain": {"ttl_seconds": -1}}, "kv_hints.retain.ttl_seconds"),
        ({"retain": {"ttl_seconds": 9}, "drop_after_use": True}, "kv_hints"),
        ({"block_types": [{"type": "user", "messages": 5}]}, "kv_hints.block_types.0.messages"),
    ],
)
def test_a_bad_hint_is_refused_by_name_on_every_route(server: ServerProcess, hints: Any, field: str) -> None:
    bodies = {
        "/v1/chat/completions": {"model": server.name, "messages": _messages(80)},
        "/v1/completions": {"model": server.name, "prompt": "Alice copper."},
        "/generate": {"text": "Alice copper."},
    }
    for route, body in bodies.items():
        for stream in (False, True):
            request = {**body, "stream": stream, "kv_hints": hints}
            answer = httpx.post(f"{server.base_url}{route}", json=request, trust_env=False)
            assert answer.status_code == 400, (route, answer.text)
            assert field in json.dumps(answer.json()), (route, answer.text)
            assert "Traceback" not in answer.text
