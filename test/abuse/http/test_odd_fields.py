"""One odd field, or two, on every route that computes: answered or refused, and the server lives."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from support.odd_requests import OddRequest
from support.route_fields import seeded_odd_requests
from support.seeded_fuzz import requests_or_nightly
from support.servers import ServerProcess

pytestmark = pytest.mark.server

ANSWERS = {200, 400, 404, 422, 501}
CANARY = {
    "input_ids": [300 + 7 * place % 600 for place in range(200)],
    "sampling_params": {"max_new_tokens": 8, "temperature": 0},
}
EVERY = 50
MEMORY_GROWTH = 256 << 20
"""Of all processes together; answers and their log probabilities come and go."""


def answer_to(client: httpx.Client, request: OddRequest, model: str) -> httpx.Response:
    # httpx sends no NaN, and no half of a surrogate pair.
    content = json.dumps(request.to(model))
    return client.post(request.path, content=content, headers={"content-type": "application/json"})


@requests_or_nightly
def test_odd_fields_are_answered_or_refused_and_end_nothing(
    server: ServerProcess, client: httpx.Client, count: int
):
    def canary() -> list[int]:
        answer: dict[str, Any] = server.post("/generate", CANARY)
        return list(answer["output_ids"])

    made = seeded_odd_requests(34)
    expected, memory = canary(), server.memory()
    seen: dict[int, int] = {}
    for number in range(count):
        request = made.next()
        try:
            answer = answer_to(client, request, server.name)
        except httpx.TransportError as error:
            error.add_note(f"request {number} to {request.path}: {request.odd!r:.500}; {server.log_tail()}")
            raise
        what = (number, request.path, request.odd, answer.text[:500])
        assert answer.status_code in ANSWERS, what
        assert "Internal server error" not in answer.text, what
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        if number % EVERY == 0:
            assert canary() == expected, what
    assert canary() == expected
    assert min(seen[200], seen[400]) > count // 20, f"one of both was hardly tried: {seen}"
    assert server.memory() - memory < MEMORY_GROWTH
    # Nothing is left of them: only an idle server, whose books balance, can be flushed.
    server.flush_cache()
    assert canary() == expected
