"""Sessions through the real routes: what they had alone is given back when they say that they are over."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sgl_importance_lab.probe.tokenizer import encode, render

from support.servers import ServerProcess

pytestmark = pytest.mark.server

PAGE = 16
POOL_TOKENS = 1024
DOCUMENT = 160  # tokens: six fill the pool
WORDS = [
    "Alice copper.",
    "Bruno lantern.",
    "David marble.",
    "Edith ladder.",
    "Clara copper.",
    "Felix marble.",
]

Body = dict[str, Any]


@pytest.fixture(scope="module")
def started(probe_model: Path) -> Iterator[ServerProcess]:
    flags = ["--kv-policy", "importance", "--page-size", str(PAGE), "--enable-metrics"]
    with ServerProcess(*flags, "--max-total-tokens", str(POOL_TOKENS), model=probe_model) as process:
        yield process


@pytest.fixture
def server(started: ServerProcess) -> ServerProcess:
    started.flush_cache()
    return started


def document(seed: int, tokens: int = DOCUMENT) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 200) for _ in range(tokens)]


def generate(server: ServerProcess, ids: list[int], **fields: Any) -> int:
    """Tokens that the request found."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "ignore_eos": True}, **fields}
    return int(server.post("/generate", body)["meta_info"]["cached_tokens"])


def close(server: ServerProcess, session: str, **fields: Any) -> Body:
    answer: Body = server.post("/close_session", {"session_id": session, **fields})
    return answer


def refused(server: ServerProcess, path: str, body: Body) -> str:
    answer = httpx.post(f"{server.base_url}{path}", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 400, answer.text
    document = answer.json()
    error = document.get("error") or document
    message: str = error.get("message") or error["detail"]
    assert "\n" not in message
    return message


def test_a_closed_sessions_pages_leave_before_older_ones_and_shared_ones_stay(server: ServerProcess) -> None:
    shared = document(0)
    generate(server, document(1), session_id="older")
    generate(server, shared + document(2), session_id="closed")
    generate(server, shared + document(3), session_id="other")
    answer = close(server, "closed")
    assert answer == {
        "session_id": "closed",
        "was_open": True,
        "given_back_tokens": {"device": DOCUMENT, "host": 0},
    }
    assert not close(server, "closed")["was_open"]
    generate(server, document(4, 2 * DOCUMENT), session_id="newer")  # room for one of the two is wanted
    generate(server, document(5), session_id="newest")
    assert generate(server, document(1)) >= DOCUMENT - PAGE
    assert DOCUMENT <= generate(server, shared + document(2)) < DOCUMENT + PAGE


def test_at_once_frees_the_pages_of_one_namespace(server: ServerProcess) -> None:
    for salt in ("a", "b"):
        generate(server, document(7), session_id="same", cache_salt=salt, extra_key="key")
    assert not close(server, "same")["was_open"]
    assert not close(server, "same", cache_salt="a")["was_open"]
    used = server.metric("sglang:kv_importance_used_tokens", tier="device")
    gone = close(server, "same", cache_salt="a", extra_key="key", at_once=True)
    assert gone["given_back_tokens"]["device"] == DOCUMENT
    assert generate(server, document(7), cache_salt="b", extra_key="key") >= DOCUMENT - PAGE
    assert server.metric("sglang:kv_importance_used_tokens", tier="device") <= used - DOCUMENT
    assert generate(server, document(7), cache_salt="a", extra_key="key") == 0


def messages(seed: int) -> list[Body]:
    rng = random.Random(seed)
    return [{"role": "user", "content": " ".join(rng.choice(WORDS) for _ in range(24))}]


def of_routes(seed: int) -> dict[str, Body]:
    return {
        "/generate": {"input_ids": document(seed), "sampling_params": {"max_new_tokens": 1}},
        "/v1/completions": {"prompt": list(encode(messages(seed))), "max_tokens": 1},
        "/v1/chat/completions": {"messages": messages(seed), "max_tokens": 1},
        "/v1/responses": {"input": messages(seed), "max_output_tokens": 4},
        "/v1/messages": {"messages": messages(seed), "max_tokens": 1},
        "/api/chat": {"messages": messages(seed), "stream": False, "options": {"num_predict": 1}},
        "/api/generate": {
            "prompt": render(messages(seed)),
            "stream": False,
            "options": {"num_predict": 1},
        },
    }


def test_every_route_that_generates_knows_the_session(server: ServerProcess) -> None:
    for number, (route, body) in enumerate(of_routes(0).items()):
        server.flush_cache()
        assert body is not None
        server.post(route, {"model": server.name, **of_routes(number)[route], "session_id": route})
        closed = close(server, route)
        assert closed["was_open"], route
        assert closed["given_back_tokens"]["device"] >= 2 * PAGE, route


def test_a_session_that_sglang_opened_is_closed_there_too(server: ServerProcess) -> None:
    opened = server.post("/open_session", {"capacity_of_str_len": 1000})
    generate(server, document(8), session_params={"id": opened, "rid": None})
    assert close(server, opened)["given_back_tokens"]["device"] == DOCUMENT
    body = {"input_ids": document(8), "session_params": {"id": opened, "rid": None}}
    assert "session" in refused(server, "/generate", body)


def test_hints_reach_a_request_in_a_session_that_sglang_opened(server: ServerProcess) -> None:
    """sglang drops them there."""
    opened = server.post("/open_session", {"capacity_of_str_len": 1000})
    hints = {"report": True, "session_over": True}
    body = {"input_ids": document(10), "session_params": {"id": opened, "rid": None}, "kv_hints": hints}
    report = server.post("/generate", body)["meta_info"]["kv_importance"]
    assert report["prompt_tokens"] == DOCUMENT
    assert report["hints"]["session_over"]["applied"]


def test_actions_that_others_share_are_followed_or_ignored_and_counted(server: ServerProcess) -> None:
    def counted(action: str, outcome: str) -> float:
        name = "sglang:kv_importance_hint_actions_total"
        return server.metric(name, action=action, outcome=outcome)

    kinds = [("kv.deref", "followed"), ("kv.prefetch", "ignored"), ("other", "ignored")]
    before = [counted(*kind) for kind in kinds]
    given = [
        {"action_id": str(number), "action_type": kind, "action_version": "1.0", "payload": {}}
        for number, kind in enumerate(["kv.deref", "kv.prefetch", "acme.warm"])
    ]
    envelope = {"protocol_version": "0.1", "message_id": "m", "actions": given}
    for route in ("/generate", "/v1/chat/completions", "/v1/messages"):
        body = {"model": server.name, **of_routes(9)[route], "session_id": "shared", "kv_hints": envelope}
        server.post(route, body)
        assert not close(server, "shared")["was_open"], route
    assert [counted(*kind) for kind in kinds] == [each + 3 for each in before]


# ---- Anthropic's cache_control ----


def pinned_tokens(server: ServerProcess) -> list[tuple[int, float]]:
    pins = server.get("/kv_importance/pins")["pins"]
    return [(each["tokens"], each["expires_in_seconds"]) for each in pins]


@pytest.mark.parametrize(("ttl", "seconds"), [(None, 300), ("5m", 300), ("1h", 3600)])
def test_a_breakpoint_retains_the_prompt_for_its_ttl(
    server: ServerProcess, ttl: str | None, seconds: int
) -> None:
    session = f"anthropic-{ttl}"
    control = {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})
    text = messages(11)[0]["content"]
    content = [{"type": "text", "text": text, "cache_control": control}]
    body = {"model": server.name, "max_tokens": 1, "session_id": session}
    prompt = server.post("/v1/messages", {**body, "messages": [{"role": "user", "content": content}]})
    tokens = prompt["usage"]["input_tokens"] + (prompt["usage"].get("cache_read_input_tokens") or 0)
    ((pinned, expires),) = pinned_tokens(server)
    assert pinned == tokens // PAGE * PAGE
    assert seconds - 120 < expires <= seconds
    close(server, session)
    assert pinned_tokens(server) == []


def test_a_breakpoint_behind_the_system_prompt_retains_that_alone(server: ServerProcess) -> None:
    system = " ".join(WORDS * 4)
    block = {"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}
    body = {"model": server.name, "max_tokens": 1, "messages": messages(12), "session_id": "system"}
    whole = server.post("/v1/messages", {**body, "system": [block]})["usage"]["input_tokens"]
    ((pinned, _),) = pinned_tokens(server)
    assert 2 * PAGE <= pinned <= whole - 3 * PAGE
    close(server, "system")


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        (
            "/v1/messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "2d"}}
                        ],
                    }
                ],
                "max_tokens": 1,
            },
            "messages.0.content.0.cache_control.ttl: must be 5m or 1h",
        ),
        ("/v1/messages", {"messages": messages(0), "max_tokens": 1, "session_id": 7}, "session_id: must be"),
        ("/close_session", {"session_id": "a", "at_once": "yes"}, "at_once: "),
        ("/close_session", {"session_id": ""}, "session_id: "),
        ("/close_session", {"session_id": "a", "lora_path": "x"}, "lora_path: no adapter x is loaded"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    server: ServerProcess, path: str, body: Body, problem: str
) -> None:
    assert refused(server, path, {"model": server.name, **body}).startswith(problem)
