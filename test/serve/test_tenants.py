"""Tenants of one server: whatever routes they take, none is served from what another has computed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from sgl_importance_lab.probe.tokenizer import encode, render

from support.kept import wait_until_kept
from support.servers import ServerProcess

pytestmark = pytest.mark.server

PAGE_SIZE = 16
POOL_TOKENS = 4096
PAIRS = 48  # of a name and a thing: some 100 tokens
WORDS = (["Alice", "Bruno", "David", "Edith", "Clara", "Felix"], ["copper", "lantern", "marble", "ladder"])

Body = dict[str, Any]


@pytest.fixture(scope="module")
def server(probe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = (
        *("--kv-policy", "importance", "--page-size", str(PAGE_SIZE), "--max-total-tokens", str(POOL_TOKENS)),
        *("--enable-hierarchical-cache", "--hicache-ratio", "4"),
        *("--kv-importance-store", str(tmp_path_factory.mktemp("store"))),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": PAGE_SIZE})),
        "--enable-response-store",
    )
    with ServerProcess(*flags, model=probe_model) as process:
        yield process


def words(seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(f"{rng.choice(WORDS[0])} {rng.choice(WORDS[1])}." for _ in range(PAIRS))


# ---- one prompt on every route, token for token the same ----


def messages(seed: int) -> list[Body]:
    return [{"role": "user", "content": words(seed)}]


def tokens(seed: int) -> list[int]:
    return list(encode(messages(seed)))


IN_SESSION = "/open_session"
"""Stands for /generate in a session that was opened for it."""
ROUTES: dict[str, Callable[[int], Body]] = {
    "/generate": lambda seed: {"input_ids": tokens(seed), "sampling_params": {"max_new_tokens": 1}},
    "/vertex_generate": lambda seed: {
        "instances": [{"input_ids": tokens(seed)}],
        "parameters": {"sampling_params": {"max_new_tokens": 1}},
    },
    "/v1/completions": lambda seed: {"prompt": tokens(seed), "max_tokens": 1},
    "/v1/chat/completions": lambda seed: {"messages": messages(seed), "max_tokens": 1},
    "/invocations": lambda seed: {"messages": messages(seed), "max_tokens": 1},
    "/v1/responses": lambda seed: {"input": messages(seed), "max_output_tokens": 4},
    "/v1/messages": lambda seed: {"messages": messages(seed), "max_tokens": 1},
    "/api/chat": lambda seed: {"messages": messages(seed), "stream": False, "options": {"num_predict": 1}},
    "/api/generate": lambda seed: {
        "prompt": render(messages(seed)),
        "stream": False,
        "options": {"num_predict": 1},
    },
    "/v1/score": lambda seed: {"query": tokens(seed), "items": [[9]], "label_token_ids": [9]},
    IN_SESSION: lambda seed: {"input_ids": tokens(seed), "sampling_params": {"max_new_tokens": 1}},
}


def found(server: ServerProcess, route: str, body: Body, namespace: Body) -> dict[str, int]:
    """Tokens that a request found, by tier, as its own answer reports them."""
    fields = {**namespace, "kv_hints": {"report": True}}
    if route == "/vertex_generate":
        asked = {**body, "parameters": {**body["parameters"], **fields}}
    else:
        asked = {"model": server.name, **body, **fields}
    if route == IN_SESSION:
        opened = server.post(IN_SESSION, {"capacity_of_str_len": 10_000})
        route, asked = "/generate", {**asked, "session_params": {"id": opened, "rid": None}}
    answer = server.post(route, asked)
    return report_of(answer)["hit_tokens"]


def report_of(answer: Any) -> Body:
    if "predictions" in answer:
        (answer,) = answer["predictions"]
    report: Body = answer.get("meta_info", answer.get("usage", answer))["kv_importance"]
    return report


SALTS = (f"{number}" for number in count())
"""Each stranger's is new: what one computes is no other's."""


BY_DAY = {"/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", IN_SESSION}


@pytest.mark.parametrize(
    "route",
    [route if route in BY_DAY else pytest.param(route, marks=pytest.mark.nightly) for route in ROUTES],
)
def test_nobody_is_served_from_what_another_computed(server: ServerProcess, route: str) -> None:
    seed = list(ROUTES).index(route)
    mine = {"cache_salt": "ab", "extra_key": "c"}
    assert sum(found(server, route, ROUTES[route](seed), mine).values()) == 0
    for other, make in ROUTES.items():
        for stranger in ({"cache_salt": next(SALTS)}, {"extra_key": next(SALTS)}):
            assert sum(found(server, other, make(seed), stranger).values()) == 0, (route, other)
        assert sum(found(server, other, make(seed), mine).values()) >= 5 * PAGE_SIZE, (route, other)


def test_parts_that_join_to_the_same_text_are_apart_on_device_and_host(server: ServerProcess) -> None:
    mine: Body = {"cache_salt": "ab", "extra_key": "c"}
    strangers: list[Body] = [
        {},
        {"cache_salt": "abc"},
        {"extra_key": "abc"},
        {"cache_salt": "a", "extra_key": "bc"},
    ]
    server.flush_cache()  # the host has room for all that comes, the device has not
    bodies = [ROUTES["/v1/messages"](seed) for seed in range(100, 140)]
    for body in bodies:
        assert sum(found(server, "/v1/messages", body, mine).values()) == 0
    of_tiers = []
    for body, stranger in zip(bodies, strangers * 10, strict=True):
        assert sum(found(server, "/v1/messages", body, stranger).values()) == 0, stranger
        of_tiers.append(found(server, "/v1/messages", body, mine))
    assert all(sum(tiers.values()) >= 5 * PAGE_SIZE for tiers in of_tiers)
    assert sum(tiers["host"] for tiers in of_tiers) > 0


def test_storage_keeps_tenants_apart(server: ServerProcess) -> None:
    mine: Body = {"cache_salt": "stored", "extra_key": "key"}
    found(server, "/v1/responses", ROUTES["/v1/responses"](300), mine)
    wait_until_kept(server)
    server.flush_cache()
    body = ROUTES["/v1/messages"](300)
    for stranger in ({}, {"cache_salt": "stored"}, {"extra_key": "key"}, {"cache_salt": "storedkey"}):
        assert sum(found(server, "/v1/messages", body, stranger).values()) == 0, stranger
    for route, make in ROUTES.items():
        wait_until_kept(server)
        server.flush_cache()
        assert found(server, route, make(300), mine)["storage"] >= 5 * PAGE_SIZE, route


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_a_session_goes_on_in_the_namespace_of_its_requests_only(server: ServerProcess, field: str) -> None:
    """What one tenant has said there is no context of another who guesses the ids."""
    opened = server.post(IN_SESSION, {"capacity_of_str_len": 10_000})
    body = {**ROUTES[IN_SESSION](500), "model": server.name, field: "mine"}
    server.post("/generate", {**body, "rid": "turn 1", "session_params": {"id": opened, "rid": None}})
    goes_on = {**body, "input_ids": [9], "session_params": {"id": opened, "rid": "turn 1"}}
    for name in (None, "a stranger's"):
        answer = httpx.post(
            f"{server.base_url}/generate", json={**goes_on, field: name}, timeout=60, trust_env=False
        )
        assert answer.status_code == 400, answer.text
        assert "no such request of this cache_salt, extra_key" in answer.text
    assert server.post("/generate", goes_on)["meta_info"]["prompt_tokens"] > len(tokens(500))


# ---- reports and refusals ----


def test_streams_end_with_the_report(server: ServerProcess) -> None:
    with_usage = {"stream_options": {"include_usage": True}}
    for seed, (route, more) in enumerate(
        {
            "/v1/chat/completions": with_usage,
            "/v1/completions": with_usage,
            "/v1/responses": {},
            "/v1/messages": {},
            "/api/chat": {},
            "/api/generate": {},
        }.items(),
        start=400,
    ):
        fields = {
            "model": server.name,
            "stream": True,
            "cache_salt": "s",
            "kv_hints": {"report": True},
            **more,
        }
        answer = httpx.post(
            f"{server.base_url}{route}", json=ROUTES[route](seed) | fields, timeout=60, trust_env=False
        )
        lines = [line for line in answer.text.splitlines() if '"kv_importance"' in line]
        assert len(lines) == 1, (route, answer.text)
        assert '"prompt_tokens": ' in lines[0]
        assert found(server, route, ROUTES[route](seed), {"cache_salt": "s"})["device"] >= 5 * PAGE_SIZE
