"""Every route of ours with made-up parameters, bodies, headers and paths: no caller makes the server fail."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode

from support.seeded_fuzz import every_run_and_nightly, fuzz
from support.servers import ServerProcess

pytestmark = pytest.mark.server

PREFIX = "/kv_importance"
READS = ("", "/pins", "/tree", "/node/1", "/node/1/prompt", "/events", "/why", "/prewarm", "/prewarm/x")
ACTS = ("/pin", "/unpin", "/find", "/importance", "/why", "/prewarm")
OPERATIONS = len(READS) + len(ACTS) + 1  # a pre-warm can be deleted
ANSWERS = {200, 400, 403, 404, 405, 415}


def check(status: int, answer: Any) -> None:
    """What is wrong is the caller's error, in one line and without our code."""
    if status == 503:
        assert "pre-warms have not ended" in answer["message"]
        return
    assert status in ANSWERS, answer
    if status >= 400:
        said = answer.get("message") or answer.get("detail")
        assert said, answer
        assert "Traceback" not in said
        assert "sglang_importance" not in said


@pytest.fixture(autouse=True)
def no_pins_left(client: httpx.Client) -> Iterator[None]:
    """So that there is room for the next ones."""
    yield
    for pin in client.get(f"{PREFIX}/pins").json()["pins"]:
        client.post(f"{PREFIX}/unpin", json={"pin_id": pin["pin_id"]})


# ---- what the server's own document says ----


def cases(client: httpx.Client, mode: GenerationMode) -> SearchStrategy[schemathesis.Case]:
    document = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    ours = document.include(path_regex=f"^{PREFIX}")
    operations = [each.ok() for each in ours.get_all_operations()]
    assert len(operations) == OPERATIONS
    return st.one_of([operation.as_strategy(generation_mode=mode) for operation in operations])


@every_run_and_nightly
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fits", "does not"])
def test_requests_that_fit_the_document_and_others(client: httpx.Client, mode: GenerationMode, share: int):
    with requests.Session() as session:
        session.trust_env = False

        def send(case: schemathesis.Case) -> None:
            answer = case.call(base_url=str(client.base_url).rstrip("/"), session=session)
            check(answer.status_code, answer.json())

        fuzz(send, cases(client, mode), count=150 * share)


# ---- bodies ----

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
roles = st.sampled_from(["system", "user", "assistant", "tool", "developer", "nobody"])
messages = st.lists(
    st.fixed_dictionaries({"role": roles | json_values, "content": st.text() | json_values}), max_size=3
)
hexadecimal = st.text("0123456789abcdefABCDEF", min_size=32, max_size=32)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(min_size=1) | st.just("Alice copper. " * 20) | json_values,
        "messages": messages | json_values,
        "input_ids": st.lists(st.integers(-2, 2000), max_size=64) | json_values,
        "cache_salt": st.text() | json_values,
        "extra_key": st.text() | json_values,
        "tools": st.lists(json_values, max_size=2),
        "ttl_seconds": st.floats() | json_values,
        "max_seconds": st.floats(0.001, 1) | json_values,
        "pin_id": st.text() | json_values,
        "keys": st.lists(hexadecimal, max_size=9) | json_values,
        "more": json_values,
    },
)
prompts = st.one_of(
    st.fixed_dictionaries({"text": st.text(min_size=1).map(lambda text: text * 40)}),
    st.fixed_dictionaries({"messages": messages.filter(bool)}),
    st.fixed_dictionaries({"input_ids": st.lists(st.integers(0, 1200), min_size=1, max_size=200)}),
)
salted = st.fixed_dictionaries({}, optional={"cache_salt": st.text(), "extra_key": st.text()})


@every_run_and_nightly
def test_bodies_with_the_right_names(client: httpx.Client, share: int):
    def send(path: str, body: dict[str, Any]) -> None:
        headers = {"content-type": "application/json"}
        answer = client.post(PREFIX + path, content=json.dumps(body), headers=headers)
        check(answer.status_code, answer.json())

    fuzz(send, st.sampled_from(ACTS), bodies, count=150 * share)


@every_run_and_nightly
def test_prompts_of_every_form(client: httpx.Client, share: int):
    accepted = 0

    def send(path: str, prompt: dict[str, Any], namespace: dict[str, str]) -> None:
        nonlocal accepted
        content = json.dumps({**prompt, **namespace})  # httpx sends no NaN
        answer = client.post(PREFIX + path, content=content, headers={"content-type": "application/json"})
        check(answer.status_code, answer.json())
        accepted += answer.status_code == 200

    fuzz(send, st.sampled_from(("/pin", "/find", "/prewarm")), prompts, salted, count=60 * share)
    assert accepted > 10 * share, "most were refused before anything was done with them"


deep = [b"[" * 100_000, b'{"a":' * 100_000]
garbage = st.binary() | st.sampled_from(
    [*deep, b'"\\ud800"', b"\xff\xfe{\x00}\x00", b"NaN", b"1e999", b"null"]
)


@every_run_and_nightly
def test_bodies_that_are_none(client: httpx.Client, share: int):
    types = ["application/json", "application/json; charset=utf-16", "text/plain", "multipart/form-data", ""]

    def send(path: str, content: bytes, sent_as: str) -> None:
        answer = client.post(PREFIX + path, content=content, headers={"content-type": sent_as})
        check(answer.status_code, answer.json())

    fuzz(send, st.sampled_from(ACTS), garbage, st.sampled_from(types), count=60 * share)


# ---- headers and paths ----

NAMES = ("origin", "host", "sec-fetch-site", "content-type", "authorization", "cookie", "accept", "range")
MORE_NAMES = ("expect", "x-forwarded-for", "x-forwarded-host", "x-smg-routing-key", "content-encoding")
headers = st.dictionaries(
    st.sampled_from(NAMES + MORE_NAMES),
    st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=40).map(
        lambda text: text.strip(" ")  # httpx sends none around a value
    )
    | st.sampled_from(
        ["http://[", "http://[::1", "https://a:b:c", "null", "*/*", "100-continue", "bytes=0-"]
    ),
    max_size=4,
)


@every_run_and_nightly
def test_headers(client: httpx.Client, share: int):
    def send(path: str, values: dict[str, str]) -> None:
        lines = {name: value.encode("latin-1") for name, value in values.items()}
        answer = client.get(PREFIX + path, headers=lines)
        check(answer.status_code, answer.json())

    fuzz(send, st.sampled_from(READS), headers, count=100 * share)


pieces = st.binary(max_size=20) | st.sampled_from(
    [b"%00", b"%", b"%zz", b"..", b"//", b"%2e%2e%2f", b"?", b"#", b"\xff", b"/node/" + b"9" * 5000, b"ui"]
)
methods = st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH", b"TRACE"])


@every_run_and_nightly
def test_paths_that_no_client_would_send(server: ServerProcess, share: int):
    def send(method: bytes, parts: list[bytes]) -> None:
        path = b"/".join([PREFIX.encode(), *(part.translate(None, b" \r\n\t") for part in parts)])
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(method + b" " + path + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 "), (method, path, answer)
        assert int(answer.split()[1]) in {200, 307, 400, 403, 404, 405}, (method, path, answer)

    fuzz(send, methods, st.lists(pieces, max_size=3), count=80 * share)


@every_run_and_nightly
def test_callers_that_go_away(server: ServerProcess, client: httpx.Client, share: int):
    def leave(path: str, sent: int) -> None:
        request = f"GET {PREFIX}{path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(request[: len(request) * sent // 10])

    fuzz(leave, st.sampled_from(READS), st.integers(0, 10), count=60 * share)
    for path, name in (("/pins", "pins"), ("/tree", "nodes"), ("", "next_cursor")):
        assert name in client.get(PREFIX + path).json()
