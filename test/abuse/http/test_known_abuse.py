"""What once broke a server or misled its caller, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest

from support.http_abuse import message, tokens
from support.servers import ServerProcess
from support.waiting import wait_until

pytestmark = pytest.mark.server

PREFIX = "/kv_importance"
CALLERS = 100
BEYOND = 99_999_999
ENVELOPE: dict[str, Any] = {"protocol_version": "1", "message_id": "m", "actions": []}


# ---- many callers ----


def at_once(do: Callable[[int], httpx.Response], count: int = CALLERS) -> list[httpx.Response]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(do, range(count)))


def test_a_hundred_clients_pin_at_once(server: ServerProcess, client: httpx.Client):
    def pin(number: int) -> httpx.Response:
        body = {"input_ids": tokens(number, 32), "cache_salt": f"tenant {number % 5}"}
        return httpx.post(f"{server.base_url}{PREFIX}/pin", json=body, trust_env=False, timeout=120)

    # Hints of other tests retain for up to five seconds.
    wait_until(lambda: client.get(f"{PREFIX}/pins").json()["pins"] == [])
    answers = at_once(pin)
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    names = [answer.json()["pin_id"] for answer in answers]
    listed = client.get(f"{PREFIX}/pins").json()["pins"]
    assert {pin["pin_id"] for pin in listed} == set(names)
    ended = at_once(lambda number: client.post(f"{PREFIX}/unpin", json={"pin_id": names[number]}))
    assert {answer.status_code for answer in ended} == {200}
    assert client.get(f"{PREFIX}/pins").json()["pins"] == []


def test_a_hundred_clients_read_at_once_and_each_gets_what_it_asked_for(client: httpx.Client):
    asked = {"": "nodes", "/pins": "budget", "/tree": "more", "/events": "next", "/prewarm": "jobs"}
    paths = [*asked] * (CALLERS // len(asked))
    answers = at_once(lambda number: client.get(PREFIX + paths[number]))
    for path, answer in zip(paths, answers, strict=True):
        assert answer.status_code == 200, answer.text
        assert asked[path] in answer.json()


# ---- pre-warms ----


def prewarm(client: httpx.Client, **body: Any) -> str:
    answer = client.post(f"{PREFIX}/prewarm", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["job_id"])


def job(client: httpx.Client, job_id: str) -> dict[str, Any]:
    return dict(client.get(f"{PREFIX}/prewarm/{job_id}").json())


def test_a_streamed_request_for_several_samples_does_not_keep_pre_warms_waiting(client: httpx.Client):
    body = {"input_ids": tokens(1, 40), "stream": True, "sampling_params": {"n": 2, "max_new_tokens": 2}}
    with client.stream("POST", "/generate", json=body) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")
    job_id = prewarm(client, input_ids=tokens(2, 200))
    wait_until(lambda: job(client, job_id)["state"] != "running")
    ended = job(client, job_id)
    assert (ended["state"], ended["detail"]) == ("done", ""), "its time was over, and nothing done"
    assert ended["done_tokens"] == ended["total_tokens"] > 0


def test_a_cancelled_pre_warm_is_over(client: httpx.Client):
    """Whatever it was doing; and the answer that it was waiting for goes to nobody else."""
    over = Event()

    def read(path: str) -> Iterator[set[str]]:
        while not over.is_set():
            yield set(client.get(PREFIX + path).json())

    readers = [("/pins", "budget"), ("/tree", "more"), ("/events", "next"), ("", "next_cursor")] * 2
    with ThreadPoolExecutor(len(readers)) as pool:
        reading = [pool.submit(lambda path=path: list(read(path))) for path, _ in readers]
        jobs, ended = [], []
        try:
            for number in range(8):
                jobs.append(prewarm(client, input_ids=tokens(100 + number, 400)))
                ended.append(client.delete(f"{PREFIX}/prewarm/{jobs[-1]}").json())
        finally:
            over.set()
        for (path, name), answers in zip(readers, reading, strict=True):
            assert all(name in answer for answer in answers.result()), path
    assert {each["state"] for each in ended} <= {"cancelled", "done"}
    assert [job(client, job_id) for job_id in jobs] == ended


# ---- metrics ----


def test_metrics_do_not_grow_with_what_callers_ask_for(server: ServerProcess, client: httpx.Client):
    for word in (*map(str, range(8)), "x", "%00", "%C3%BC", "a/b/c"):
        for path in ("/node/{}", "/node/{}/prompt", "/prewarm/{}", "/{}"):
            for method in ("GET", "POST", "DELETE"):
                answer = client.request(method, PREFIX + path.format(word))
                assert answer.status_code in (200, 400, 404, 405), (method, path, word, answer.text)
    endpoints = {
        series.partition('endpoint="')[2].partition('"')[0]
        for series in server.metrics()
        if 'endpoint="' in series
    }
    ours = {endpoint for endpoint in endpoints if endpoint.startswith(PREFIX)}
    templates = {path for path in client.get("/openapi.json").json()["paths"] if path.startswith(PREFIX)}
    assert PREFIX + "/node/{node_id}" in ours
    assert ours <= {*templates, PREFIX + "/{unknown:path}"}


# ---- other sites ----


@pytest.mark.parametrize("path", ["/tree", "/pins", "/events", "", "/node/1"])
def test_an_origin_that_is_no_url_is_another_site_s(client: httpx.Client, path: str):
    assert client.get(PREFIX + path, headers={"origin": "http://["}).status_code == 403


# ---- hints ----


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("hints", "problem"),
    [
        ({"retain": {"ttl_seconds": 60}, "actions": []}, "kv_hints.retain: would be ignored beside actions"),
        ({**ENVELOPE, "report": True}, "kv_hints.report: would be ignored beside"),
        ({"actions": []}, "kv_hints.protocol_version: is missing beside actions"),
        ({**ENVELOPE, "message_id": 7}, "kv_hints.message_id: "),
        ({**ENVELOPE, "actions": [{"action_type": "x"}]}, "kv_hints.actions.0.action_id: "),
    ],
)
def test_an_envelope_that_is_none_is_refused_by_name(
    server: ServerProcess, client: httpx.Client, hints: Any, problem: str, stream: bool
):
    bodies = {
        "/v1/chat/completions": {"model": server.name, "messages": [{"role": "user", "content": "Alice"}]},
        "/v1/completions": {"model": server.name, "prompt": "Alice copper."},
        "/generate": {"text": "Alice copper."},
    }
    for path, body in bodies.items():
        answer = client.post(path, json={**body, "stream": stream, "kv_hints": hints})
        assert answer.status_code == 400, (path, answer.text)
        assert message(answer).startswith(problem), path


# ---- token ids ----


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ids", "place"), [([BEYOND, 1, 2], ""), ([1, -1], ""), ([[1, 2], [3, BEYOND]], ".1")], ids=str
)
def test_a_token_that_the_model_does_not_have_is_refused(
    server: ServerProcess, client: httpx.Client, ids: Any, place: str, stream: bool
):
    bodies = {
        "/generate": ("input_ids", {"input_ids": ids}),
        "/v1/completions": ("prompt", {"model": server.name, "prompt": ids}),
    }
    for path, (field, body) in bodies.items():
        answer = client.post(path, json={**body, "stream": stream})
        assert answer.status_code == 400, (path, answer.text)
        wrong = -1 if -1 in ids else BEYOND
        beyond = f"token id {wrong} is beyond the model's vocabulary"
        where = f": prompt {place[1:]}" if place and path == "/v1/completions" else place
        assert message(answer).startswith(f"{field}{where}: {beyond}")
    server.raise_if_ended(0.5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_that_the_model_does_not_have_is_refused(
    server: ServerProcess, client: httpx.Client, stream: bool
):
    """sglang would mask it in the logits until ``min_new_tokens`` are generated."""
    params = {"stop_token_ids": [BEYOND], "min_new_tokens": 2, "max_new_tokens": 4}
    completion = {"model": server.name, "stop_token_ids": [-5], "min_tokens": 2, "max_tokens": 4}
    bodies = {
        "/generate": {"text": "Alice copper.", "sampling_params": params},
        "/v1/completions": {**completion, "prompt": "Alice copper."},
        "/v1/chat/completions": {**completion, "messages": [{"role": "user", "content": "Alice"}]},
    }
    for path, body in bodies.items():
        answer = client.post(path, json={**body, "stream": stream})
        assert answer.status_code == 400, (path, answer.text)
        assert "stop_token_ids: token id " in message(answer)
    server.raise_if_ended(0.5)


@pytest.mark.parametrize("stream", [False, True])
def test_more_likeliest_tokens_than_the_model_has_are_refused(
    server: ServerProcess, client: httpx.Client, stream: bool
):
    """sglang would ask for so many of the logits."""
    bodies = {
        "/generate": {"text": "Alice copper.", "return_logprob": True, "top_logprobs_num": BEYOND},
        "/v1/completions": {"model": server.name, "prompt": "Alice copper.", "logprobs": BEYOND},
        "/v1/chat/completions": {
            "model": server.name,
            "messages": [{"role": "user", "content": "Alice"}],
            "logprobs": True,
            "top_logprobs": BEYOND,
        },
    }
    for path, body in bodies.items():
        answer = client.post(path, json={**body, "stream": stream})
        assert answer.status_code == 400, (path, answer.text)
        field = {"/generate": "top_logprobs_num", "/v1/completions": "logprobs"}.get(path, "top_logprobs")
        assert message(answer).startswith(f"{field}: {BEYOND} is more than the model's vocabulary")
    server.raise_if_ended(0.5)
