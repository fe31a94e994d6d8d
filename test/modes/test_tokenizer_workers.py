"""Two tokenizer workers in front of one scheduler: whichever answers, it answers right."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from sgl_importance.metrics_table import PREFIX
from sgl_importance_lab.probe.tasks import Message, make_document
from sgl_importance_lab.probe.tokenizer import encode
from sglang_importance.launch import doctor

from support.processes import command_line, session_members
from support.python_path import CHECKS, python_path
from support.servers import REQUEST_SECONDS, START_SECONDS, ServerProcess
from support.waiting import wait_until

pytestmark = pytest.mark.server

PAGE_SIZE, POOL_TOKENS, DOCUMENT_TOKENS = 16, 1024, 200
COMMON = ("--page-size", str(PAGE_SIZE), "--max-running-requests", "4")


@pytest.fixture(scope="module")
def chats() -> list[list[Message]]:
    """Two questions about each of ten documents, twice as many tokens as the pool has."""
    documents = [make_document(DOCUMENT_TOKENS, seed) for seed in range(10)]
    return [document.messages(list(document.records)[each]) for each in (0, 1) for document in documents]


@pytest.fixture(scope="module")
def answers(probe_model: Path, chats: list[list[Message]]) -> list[list[int]]:
    """Of stock sglang that reuses nothing, without workers."""
    flags = ("--kv-policy", "default", "--disable-radix-cache", *COMMON)
    with ServerProcess(*flags, model=probe_model) as server:
        return [server.generate(encode(chat), max_new_tokens=4)["output_ids"] for chat in chats]


@pytest.fixture(scope="module")
def server(probe_model: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(
        *("--kv-policy", "importance", "--tokenizer-worker-num", "2", *COMMON),
        *("--max-total-tokens", str(POOL_TOKENS), "--tool-call-parser", "llama3"),
        model=probe_model,
        env={
            **python_path(CHECKS / "tree_check"),
            "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "600",  # for workers that ``only`` has stopped
        },
    )
    with process:
        wait_until(lambda: len(workers(process)) == 2)
        yield process


def workers(server: ServerProcess) -> list[psutil.Process]:
    titled = (
        each for each in session_members(server.pid) if "tokenizer_worker" in " ".join(command_line(each))
    )
    return sorted(titled, key=lambda each: each.pid)


@contextmanager
def only(server: ServerProcess, number: int) -> Iterator[httpx.Client]:
    """Requests that one worker answers: the others are stopped meanwhile."""
    others = [each for each in workers(server) if each != workers(server)[number]]
    for other in others:
        other.suspend()
    try:
        with httpx.Client(base_url=server.base_url, timeout=REQUEST_SECONDS, trust_env=False) as client:
            yield client
    finally:
        for other in others:
            other.resume()


def end_is_told(client: httpx.Client, node: str) -> bool:
    return bool(client.get(node).raise_for_status().json()["answer_end"] == "end_of_turn")


def posted(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    return client.post(path, json=body).raise_for_status().json()


@pytest.mark.tested(
    kind="mode",
    name="`--tokenizer-worker-num 2`: tokens over evictions, hints and reports",
    mode="page scores from attention",
    backend="torch_native",
)
def test_every_request_gets_its_own_answer_and_report(
    server: ServerProcess, chats: list[list[Message]], answers: list[list[int]]
) -> None:
    def ask(number: int) -> dict[str, Any]:
        body = {
            "input_ids": encode(chats[number]),
            "sampling_params": {"temperature": 0, "max_new_tokens": 4},
            "rid": f"request-{number}",
            "kv_hints": {"report": True},
        }
        # A connection each: any worker takes it.
        reply = httpx.post(f"{server.base_url}/generate", json=body, timeout=REQUEST_SECONDS, trust_env=False)
        return dict(reply.raise_for_status().json())

    before = server.metric(f"{PREFIX}requests_total")
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(ask, range(len(chats))))
    assert [reply["output_ids"] for reply in replies] == answers
    assert [reply["meta_info"]["id"] for reply in replies] == [f"request-{n}" for n in range(len(chats))]
    for reply in replies:
        facts = reply["meta_info"]
        report = facts["kv_importance"]
        assert report["prompt_tokens"] == facts["prompt_tokens"]
        assert report["hit_tokens"]["device"] == facts["cached_tokens"]
    server.flush_cache()
    assert server.metric(f"{PREFIX}requests_total") - before == len(chats)
    assert server.metric(f"{PREFIX}evicted_tokens_total", tier="device") > 0
    assert "tree_check: sound with" in server.log()


@pytest.mark.tested(
    kind="mode",
    name="`--tokenizer-worker-num 2`: routes, pins, live page, ends of answers, `doctor`",
    mode="page scores from attention",
    backend="torch_native",
)
def test_what_one_worker_did_the_other_knows(server: ServerProcess, chats: list[list[Message]]) -> None:
    server.flush_cache()
    for here, there in ((0, 1), (1, 0)):
        messages, prefix = chats[here], encode(chats[here])[: 4 * PAGE_SIZE]
        with only(server, here) as client:
            pin = posted(client, "/kv_importance/pin", {"input_ids": prefix})
            chat = {"model": server.name, "messages": messages, "temperature": 0, "max_tokens": 16}
            first = posted(client, "/v1/chat/completions", chat | {"kv_hints": {"report": True}})
            assert first["usage"]["kv_importance"]["hit_tokens"]["device"] == 0
            assert first["choices"][0]["finish_reason"] == "stop"
        with only(server, there) as client:
            (held,) = client.get("/kv_importance/pins").json()["pins"]
            assert (held["pin_id"], held["resident_tokens"]) == (pin["pin_id"], len(prefix))
            again = posted(client, "/v1/chat/completions", chat | {"kv_hints": {"report": True}})
            assert again["usage"]["kv_importance"]["hit_tokens"]["device"] > DOCUMENT_TOKENS // 2
            assert again["choices"][0]["message"] == first["choices"][0]["message"]
            found = posted(client, "/kv_importance/find", {"messages": messages})
            assert found["matched_tokens"] > DOCUMENT_TOKENS // 2
            node = f"/kv_importance/node/{found['path'][-1]['id']}"
            # The model's last token leaves it open; the worker that parsed the answer has told.
            wait_until(partial(end_is_told, client, node))
            assert client.get(node).json()["text"]["cells"]
            assert client.get("/kv_importance/events").json()["events"]
            assert client.get("/kv_importance/ui").headers["content-type"].startswith("text/html")
            posted(client, "/kv_importance/unpin", {"pin_id": pin["pin_id"]})
        with only(server, here) as client:
            assert client.get("/kv_importance/pins").json()["pins"] == []


@pytest.mark.parametrize("number", [0, 1])
def test_each_worker_looks_at_requests_before_the_scheduler(server: ServerProcess, number: int) -> None:
    with only(server, number) as client:
        unknown = client.post("/generate", json={"input_ids": [10**6]})
        assert (unknown.status_code, "vocabulary" in unknown.text) == (400, True)
        hint = client.post("/generate", json={"input_ids": [1], "kv_hints": {"no_such": 1}})
        assert (hint.status_code, "no_such" in hint.text) == (400, True)
        chat = {
            "model": server.name,
            "messages": [{"role": "user", "content": "x"}],
            "kv_hints": {"no_such": 1},
        }
        assert client.post("/v1/chat/completions", json=chat).status_code == 400
        foreign = client.get("/kv_importance", headers={"Origin": "http://elsewhere.example"})
        assert foreign.status_code == 403
        for method in ("GET", "POST"):
            warming = client.request(method, "/kv_importance/prewarm")
            assert (warming.status_code, "several tokenizer workers" in warming.text) == (501, True)


@pytest.mark.parametrize("number", [0, 1])
def test_doctor_looks_at_the_server_through_any_worker(server: ServerProcess, number: int) -> None:
    with only(server, number):
        result = CliRunner().invoke(doctor.app, ["--url", server.base_url])
    assert "importance" in result.stdout
    assert result.exit_code == 0, result.stdout


def test_a_worker_that_is_started_anew_has_our_parts(server: ServerProcess) -> None:
    before = workers(server)
    before[0].kill()
    wait_until(lambda: len(set(workers(server)) - set(before)) == 1, seconds=START_SECONDS)
    (new,) = set(workers(server)) - set(before)
    with only(server, workers(server).index(new)) as client:
        assert client.get("/kv_importance").json()["policy"] == "importance"
        report = {
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": 1},
            "kv_hints": {"report": True},
        }
        assert posted(client, "/generate", report)["meta_info"]["kv_importance"]["prompt_tokens"] == 3
