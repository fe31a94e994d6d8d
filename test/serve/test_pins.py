"""Pins over HTTP: what a pinned prefix survives, and how wrong requests are answered."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sgl_importance_lab.probe.tokenizer import encode

from support.servers import ServerProcess
from support.waiting import wait_until

pytestmark = pytest.mark.server

API_KEY = "test-key"
PAGE = 16
POOL = 2048
BUDGET = POOL // 5
SYSTEM = {"role": "system", "content": "You are asked for records. " + "Alice copper. Bruno lantern. " * 20}


@pytest.fixture(scope="module")
def server(probe_model: Path) -> Iterator[ServerProcess]:
    flags = ("--kv-policy", "importance", "--page-size", str(PAGE), "--max-total-tokens", str(POOL))
    with ServerProcess(*flags, model=probe_model, api_key=API_KEY) as process:
        yield process


@pytest.fixture(autouse=True)
def no_pins(server: ServerProcess) -> Iterator[None]:
    yield
    for pin in server.get("/kv_importance/pins")["pins"]:
        server.post("/kv_importance/unpin", {"pin_id": pin["pin_id"]})
    server.flush_cache()


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 400) for _ in range(tokens)]


def cached(server: ServerProcess, tokens: list[int], **body: Any) -> int:
    answer = server.post(
        "/generate",
        {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": 1}, **body},
    )
    return answer["meta_info"]["cached_tokens"]


def scan(server: ServerProcess, tokens: int, seed: int) -> None:
    """One-off prompts of so many tokens."""
    for serial in range(tokens // 1024):
        assert cached(server, prompt(1000 * seed + serial, 1024)) == 0


def pinned_tokens(server: ServerProcess) -> int:
    nodes = server.get("/kv_importance", limit=1000)["nodes"]
    return sum(node["tokens"] for node in nodes if node["pinned"])


def refusal(server: ServerProcess, path: str, body: Any) -> tuple[int, str]:
    with pytest.raises(httpx.HTTPStatusError) as failure:
        server.post(path, body)
    response = failure.value.response
    assert "File" not in response.text
    return response.status_code, response.json()["message"]


def test_a_pinned_prefix_survives_a_scan_of_ten_times_the_pool(server: ServerProcess):
    pinned, neighbour = prompt(1, 20 * PAGE), prompt(2, 20 * PAGE)
    answer = server.post("/kv_importance/pin", {"input_ids": pinned, "ttl_seconds": 600})
    assert (answer["tokens"], answer["granted_tokens"]) == (320, {"device": 320})
    for tokens in (pinned, neighbour):
        cached(server, tokens + prompt(3, 40))
    listed = server.get("/kv_importance/pins")
    assert [each["resident_tokens"] for each in listed["pins"]] == [320]
    assert listed["budget"] == {"device": {"tokens": BUDGET // PAGE * PAGE, "granted_tokens": 320}}
    assert pinned_tokens(server) == 320
    scan(server, 10 * POOL, seed=1)
    assert cached(server, neighbour) == 0
    assert cached(server, pinned + prompt(4, 40)) == 320
    server.post("/kv_importance/unpin", {"pin_id": answer["pin_id"]})
    assert pinned_tokens(server) == 0


def test_pins_cost_their_neighbours_no_more_than_the_budget(server: ServerProcess):
    for serial in range(4):  # together the whole pool, of which a fifth is granted
        pinned = prompt(10 + serial, POOL // 4)
        server.post("/kv_importance/pin", {"input_ids": pinned})
        cached(server, pinned)
    neighbour = prompt(20, POOL - BUDGET - 3 * PAGE)
    cached(server, neighbour)
    granted = prompt(10, BUDGET // PAGE * PAGE)
    assert cached(server, granted + prompt(5, PAGE)) == len(granted)
    assert cached(server, neighbour + prompt(6, PAGE)) >= len(neighbour) // PAGE * PAGE - 2 * PAGE


def test_one_salt_s_pins_leave_another_s_share(server: ServerProcess):
    for salt in ("a", "b"):
        for serial in range(2):
            server.post("/kv_importance/pin", {"input_ids": prompt(serial, 1024), "cache_salt": salt})
    pins = server.get("/kv_importance/pins")["pins"]
    granted = {
        salt: sum(p["granted_tokens"]["device"] for p in pins if p["cache_salt"] == salt) for salt in "ab"
    }
    share = BUDGET // PAGE // 2 * PAGE
    assert granted == {"a": share, "b": share}
    for salt in (None, "a"):
        cached(server, prompt(0, 1024), cache_salt=salt)
    assert pinned_tokens(server) == share, "the same text without the salt is not pinned"
    scan(server, 2 * POOL, seed=3)
    assert cached(server, prompt(0, 1024), cache_salt="a") == share


def test_messages_are_pinned_as_chat_requests_ask_for_them(server: ServerProcess):
    answer = server.post("/kv_importance/pin", {"messages": [SYSTEM]})
    question = [SYSTEM, {"role": "user", "content": "Question: Bruno"}]
    shared = next(
        i for i, (a, b) in enumerate(zip(encode([SYSTEM]), encode(question), strict=False)) if a != b
    )
    assert answer["tokens"] == len(encode([SYSTEM])) // PAGE * PAGE
    server.chat(question, max_tokens=2)
    scan(server, 3 * POOL, seed=4)
    usage = server.chat(question, max_tokens=2)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == shared // PAGE * PAGE


def test_text_is_pinned_as_generate_asks_for_it_and_a_lifetime_ends(server: ServerProcess):
    text = "Alice copper. Bruno lantern. Clara compass. " * 12
    server.generate(text)
    kept = server.post("/kv_importance/pin", {"text": text, "ttl_seconds": 3600})
    assert pinned_tokens(server) == kept["tokens"] > 0
    other = "Edith ladder. Frank compass. " * 12
    server.generate(other)
    short = server.post("/kv_importance/pin", {"text": other, "ttl_seconds": 1})
    assert short["granted_tokens"]["device"] == short["tokens"] > 0

    def has_ended() -> bool:
        server.generate("Question: Bruno. " * 8)
        return [pin["pin_id"] for pin in server.get("/kv_importance/pins")["pins"]] == [kept["pin_id"]]

    wait_until(has_ended)
    assert pinned_tokens(server) == kept["tokens"]


def test_a_pool_full_of_pins_still_serves(server: ServerProcess):
    for serial in range(8):
        tokens = prompt(30 + serial, 512)
        server.post("/kv_importance/pin", {"input_ids": tokens, "cache_salt": f"tenant {serial}"})
        cached(server, tokens, cache_salt=f"tenant {serial}")
    assert cached(server, prompt(50, POOL - 2 * PAGE)) == 0
    assert cached(server, prompt(50, POOL - 2 * PAGE)) > POOL - 4 * PAGE


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "give exactly one of text, messages and input_ids, not none"),
        (
            {"text": "a", "input_ids": [1]},
            "exactly one of text, messages and input_ids, not text and input_ids",
        ),
        ({"input_ids": [1, -1]}, "input_ids.1: "),
        ({"input_ids": [10**6] * 32}, "input_ids: token id 1000000 is beyond the model's vocabulary"),
        ({"input_ids": [300] * 100_000}, "input_ids: 100000 tokens do not fit the model's context"),
        (
            {"input_ids": [300] * 15},
            "input_ids: 15 tokens are less than one page of 16: there is nothing to pin",
        ),
        ({"text": "Alice"}, "text: 1 tokens are less than one page"),
        ({"text": ""}, "text: "),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages.0"),
        ({"messages": []}, "messages: "),
        ({"text": "a", "tools": []}, "tools need messages"),
        ({"text": "a", "cache_salt": "x" * 4097}, "cache_salt: String should have at most 4096 characters"),
        ({"text": "a", "extra_key": "x" * 4097}, "extra_key: String should have at most 4096 characters"),
        ({"text": "a", "ttl_seconds": 0}, "ttl_seconds: "),
        ({"text": "a", "ttl_seconds": "soon"}, "ttl_seconds: "),
        ({"text": "a", "ttl": 3}, "ttl: "),
        ([1], "dictionary"),
    ],
)
def test_a_bad_pin_is_the_caller_s_error_and_names_the_field(server: ServerProcess, body: Any, problem: str):
    status, message = refusal(server, "/kv_importance/pin", body)
    assert status == 400
    assert problem in message
    assert "\n" not in message


def test_a_pin_that_is_not_there_is_not_found(server: ServerProcess):
    status, message = refusal(server, "/kv_importance/unpin", {"pin_id": "gone"})
    assert (status, message) == (404, "pin_id: there is no pin gone: it was unpinned, has ended or never was")
    assert refusal(server, "/kv_importance/unpin", {"name": "x"})[0] == 400


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "pin"), ("POST", "unpin"), ("GET", "pins")], ids=["pin", "unpin", "pins"]
)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}], ids=["no key", "wrong key"])
def test_the_server_s_api_key_guards_pins(server: ServerProcess, method: str, path: str, headers: dict):
    url = f"{server.base_url}/kv_importance/{path}"
    answer = httpx.request(
        method, url, headers=headers, json={} if method == "POST" else None, trust_env=False
    )
    assert answer.status_code == 401
