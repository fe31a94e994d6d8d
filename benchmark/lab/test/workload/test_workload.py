"""Workloads: deterministic, skewed as asked, and their right answers are right."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance_lab.probe.tokenizer import token_ids
from sgl_importance_lab.probe.vocabulary import RECORD_END
from sgl_importance_lab.workload import drive as drive_module
from sgl_importance_lab.workload.drive import WorkloadClient, drive, summarise
from sgl_importance_lab.workload.kinds import KINDS, Shape
from sgl_importance_lab.workload.popularity import Zipf
from sgl_importance_lab.workload.workload_maker import make_workload
from sgl_importance_lab.workload.workload_request import (
    WorkloadError,
    WorkloadRequest,
    read_requests,
    write_requests,
)

SHAPE = Shape(sessions=4, document_tokens=512, turns=5, answer_tokens=32)


def make(kind: str, count: int = 40, seed: int = 0, **changes: float) -> list[WorkloadRequest]:
    shape = Shape(**{**{f: getattr(SHAPE, f) for f in Shape.__slots__}, **changes})
    return list(make_workload([kind], count, shape=shape, seed=seed))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_makes_the_same_requests(kind: str) -> None:
    assert make(kind) == make(kind)
    assert make(kind) != make(kind, seed=1)
    longer = make(kind, count=60)
    assert longer[:40] == make(kind, count=40)


@pytest.mark.parametrize("kind", ["chat", "documents", "agent"])
def test_the_right_answer_stands_once_behind_the_asked_name(kind: str) -> None:
    for request in make(kind):
        *_, question = request.messages[-1]["content"].split("Question: ")
        text = " ".join(message["content"] for message in request.messages)
        assert text.count(f"{question} {request.answer}{RECORD_END.strip()}") == 1
        # No other record of the prompt has that name.
        assert text.count(f" {question} ") + text.startswith(question) - text.count(f": {question} ") <= 1


@pytest.mark.parametrize("kind", ["chat", "documents", "agent"])
def test_the_answer_is_where_it_is_said_to_be(kind: str) -> None:
    for request in make(kind):
        position, tokens = request.answer_position(), request.token_ids()
        assert position is not None
        name = request.messages[-1]["content"].split()[-1]
        assert tokens[position - 1 : position + 1] == [token_ids()[f"{name} "], token_ids()[request.answer]]


def test_free_generation_asks_for_no_record() -> None:
    assert {request.answer_position() for request in make("generation")} == {None}


def test_a_continuation_is_what_followed_in_the_block() -> None:
    for request in make("generation"):
        tokens = request.token_ids()
        block = request.prompt.removeprefix("<|begin|>")
        assert f"{request.answer} " in block
        start = block.index(request.answer)
        shown = block[:start].split()[-8:]
        assert block.split()[-8:] == shown
        # Distinct words: what follows is never in doubt.
        words = block.split()[:-8]
        assert len(set(words)) == len(words)
        assert len(tokens) == len(words) + 8 + 1


@pytest.mark.parametrize("kind", ["chat", "agent"])
def test_a_session_grows_turn_by_turn_under_a_shared_system_message(kind: str) -> None:
    requests = make(kind, count=60)
    assert len({request.messages[0]["content"] for request in requests}) == 1
    last: dict[str, WorkloadRequest] = {}
    grown = 0
    for request in requests:
        before = last.get(request.session)
        if before is not None:
            assert request.messages[: len(before.messages)] == before.messages
            assert request.messages[len(before.messages)]["content"] == before.answer
            grown += 1
        last[request.session] = request
    assert grown > 10


def test_questions_share_their_document() -> None:
    requests = make("documents", count=60, document_skew=0.0)
    documents = {r.messages[1]["content"].split("Question: ")[0] for r in requests}
    assert len(documents) == SHAPE.sessions


def test_skew_concentrates_the_choice() -> None:
    def share_of_first(skew: float) -> float:
        requests = make("documents", count=300, document_skew=skew)
        counts = Counter(request.id.split("/")[1] for request in requests)
        return counts["0"] / 300

    assert share_of_first(0.0) == pytest.approx(0.25, abs=0.08)
    assert share_of_first(2.0) == pytest.approx(1 / (1 + 1 / 4 + 1 / 9 + 1 / 16), abs=0.08)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.floats(0, 3), st.integers(0, 1000))
def test_zipf_draws_ranks_by_their_weight(count: int, exponent: float, seed: int) -> None:
    rng, zipf = Random(seed), Zipf(count, exponent)
    drawn = Counter(zipf.draw(rng) for _ in range(4000))
    total = sum((rank + 1) ** -exponent for rank in range(count))
    for rank in range(count):
        assert drawn[rank] / 4000 == pytest.approx((rank + 1) ** -exponent / total, abs=0.05)


def test_requests_survive_their_file(tmp_path: Path) -> None:
    requests = list(make_workload(list(KINDS), 20, shape=SHAPE))
    write_requests(requests, tmp_path / "w.jsonl")
    assert read_requests(tmp_path / "w.jsonl") == requests


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    write_requests(make("chat", count=2), file)
    file.write_bytes(file.read_bytes() + b'{"id": 3}\n')
    with pytest.raises(WorkloadError, match=r"w\.jsonl:3: .*workload make"):
        read_requests(file)


@pytest.mark.parametrize(
    ("kinds", "options", "message"),
    [
        (["poetry"], {}, "unknown kind poetry: choose from chat"),
        (["chat"], {"rate": 0.0}, "raise --rate"),
        (["generation"], {"shape": Shape(document_tokens=64, answer_tokens=80)}, "lower --answer-tokens"),
        (["documents"], {"shape": Shape(document_tokens=10)}, "a document needs at least"),
    ],
)
def test_a_bad_workload_is_one_line(kinds: list[str], options: dict, message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as error:
        list(make_workload(kinds, 3, **options))
    assert "\n" not in str(error.value)


class VirtualClock:
    """Time that passes only while everybody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self._wakings: list[float] = []
        self._let_others_run = asyncio.sleep

    def perf_counter(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        waking = self.now + max(seconds, 0.0)
        self._wakings.append(waking)
        for _ in range(100):  # whoever is awake goes on, and to sleep in turn
            await self._let_others_run(0)
        while self.now < waking:
            if waking == min(self._wakings):
                self.now = waking
            await self._let_others_run(0)
        self._wakings.remove(waking)


class FakeServer(httpx.AsyncBaseTransport):
    """Answers rightly every second time, and remembers who was in flight with whom."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self.open: set[str] = set()
        self.received: dict[str, float] = {}
        self.most_open = 0
        self.answers: dict[str, str] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "fake"}]})
        body = json.loads(request.content)
        self.received[body["rid"]] = self._clock.perf_counter()
        self.open.add(body["rid"])
        self.most_open = max(self.most_open, len(self.open))
        sessions = ["/".join(rid.split("/")[:2]) for rid in self.open if rid.startswith("chat")]
        assert len(set(sessions)) == len(sessions), "two turns of one session at once"
        await asyncio.sleep(0.002)
        self.open.remove(body["rid"])
        text = self.answers[body["rid"]]
        choice = {"text": text} if "prompt" in body else {"message": {"content": text}}
        usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 3}}
        return httpx.Response(200, json={"choices": [choice], "usage": usage})


def run(
    requests: list[WorkloadRequest], concurrency: int | None, clock: Any = time
) -> tuple[FakeServer, list]:
    server = FakeServer(clock)
    server.answers = {r.id: (r.answer or "") if i % 2 else "wrong" for i, r in enumerate(requests)}
    client = WorkloadClient("http://fake")
    client._client = httpx.AsyncClient(transport=server, base_url="http://fake")
    return server, asyncio.run(drive(client, requests, concurrency=concurrency))


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop_keeps_so_many_in_flight(concurrency: int) -> None:
    requests = list(make_workload(["chat", "generation"], 30, shape=SHAPE))
    server, outcomes = run(requests, concurrency)
    assert server.most_open == concurrency
    assert [outcome.request for outcome in outcomes] == requests
    rows = {row.kind: row for row in summarise(outcomes)}
    assert rows["all"].exact_match == 0.5
    assert (rows["all"].requests, rows["all"].prompt_tokens, rows["all"].cached_tokens) == (30, 300, 90)


def test_an_open_loop_sends_at_arrival_times(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = list(make_workload(["documents"], 20, shape=SHAPE, rate=40.0))
    clock = VirtualClock()
    monkeypatch.setattr(drive_module, "time", clock)
    monkeypatch.setattr(asyncio, "sleep", clock.sleep)
    server, outcomes = run(requests, None, clock)
    assert len(outcomes) == 20
    assert server.received == pytest.approx({request.id: request.seconds for request in requests})
    assert server.most_open < 20
