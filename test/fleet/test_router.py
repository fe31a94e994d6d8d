"""Two servers behind sglang's own router: what reaches them through it, and one that dies under load."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet_processes import Process, router
from openai import OpenAI
from typer.testing import CliRunner

from sgl_importance.cli.fleet_command import app

from support.servers import ServerProcess, free_port
from support.waiting import wait_until

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        find_spec("sglang_router") is None,
        reason="sglang's router is not installed: pip install sglang-router",
    ),
]

PAGE = 16
NAME = "fleet"
WORDS = "Alice copper. " * 40
HINTS = {"report": True, "retain": {"ttl_seconds": 600}}
PROMPTS = [[number, *range(5, 5 + 4 * PAGE)] for number in range(100, 112)]
ANSWER_SECONDS = 120.0
"""Says only that an answer hangs."""


class Routed:
    """The servers and the address in front of them."""

    def __init__(self, servers: list[ServerProcess], front: Process) -> None:
        self.servers = servers
        url = front.health.removesuffix("/readiness")
        self.openai = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=ANSWER_SECONDS, max_retries=0)
        self.http = httpx.Client(base_url=url, timeout=ANSWER_SECONDS, trust_env=False)

    def chat(self, **more: Any) -> Any:
        messages = [{"role": "user", "content": WORDS}]
        create = self.openai.chat.completions.create
        return create(model=NAME, messages=messages, max_tokens=2, temperature=0, **more)

    def ask(self, tokens: list[int]) -> httpx.Response:
        sampling = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
        return self.http.post("/generate", json={"input_ids": tokens, "sampling_params": sampling})

    def workers(self) -> dict[str, bool]:
        """Whether the router takes each server for healthy."""
        rows = self.http.get("/workers").raise_for_status().json()["workers"]
        return {row["url"]: row["is_healthy"] for row in rows}


@pytest.fixture(scope="module")
def routed(probe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    folder = tmp_path_factory.mktemp("routed")
    flags = (
        *("--kv-policy", "importance", "--page-size", str(PAGE), "--max-total-tokens", "4096"),
        *("--kv-importance-store", str(folder / "store"), "--hicache-ratio", "2"),
        *("--kv-importance-prewarm", "off", "--served-model-name", NAME),
    )
    servers = [ServerProcess(*flags, model=probe_model) for _ in range(2)]
    urls = [server.base_url for server in servers]
    front = router(folder, urls, port=free_port(), metrics_port=free_port())
    try:
        for server in servers:
            server.name = NAME
            server.spawn()
        front.start()
        for server in servers:
            server.wait_ready()
        front.wait_ready()
        found = Routed(servers, front)
        wait_until(lambda: len(found.workers()) == 2 and all(found.workers().values()))
        yield found
    finally:
        front.stop(signal.SIGKILL)
        for server in servers:
            server.stop()


def test_hints_pass_where_the_router_carries_them(routed: Routed) -> None:
    completion = routed.openai.completions.create(
        model=NAME, prompt=WORDS, max_tokens=2, extra_body={"kv_hints": HINTS}
    )
    assert completion.usage.kv_importance["hints"]["retain"]["applied"]
    # It drops what it does not know of a chat, such as the field; OpenAI's own metadata stays.
    assert "kv_importance" not in routed.chat(extra_body={"kv_hints": HINTS}).usage.model_dump()
    metadata = {"kv_hints": '{"report": true}'}
    report = routed.chat(metadata=metadata).usage.kv_importance
    assert report["hit_tokens"]["device"] > 0
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = routed.chat(metadata=metadata, **stream)
    assert last.usage.kv_importance["hit_tokens"] == report["hit_tokens"]


def test_a_prompt_goes_back_to_the_server_that_has_it(routed: Routed) -> None:
    def admitted() -> list[int]:
        return [server.get("/kv_importance")["hits"]["requests"] for server in routed.servers]

    tokens = [99, *range(5, 5 + 8 * PAGE)]
    before = admitted()
    answers = [routed.ask(tokens).json() for _ in range(4)]
    assert [each["meta_info"]["cached_tokens"] for each in answers] == [0, *[8 * PAGE] * 3]
    assert sorted(now - then for now, then in zip(admitted(), before, strict=True)) == [0, 4]


def test_what_the_fleet_command_asks_goes_to_the_servers_themselves(routed: Routed) -> None:
    front = str(routed.http.base_url)
    refused = CliRunner().invoke(app, ["pins", front], env={"NO_PROXY": "*"})
    assert refused.exit_code == 2
    assert "has no /kv_importance/pins" in refused.stderr
    urls = [server.base_url for server in routed.servers]
    shown = CliRunner().invoke(app, ["pins", *urls], env={"NO_PROXY": "*"})
    assert shown.exit_code == 0
    assert "hint-" in shown.output, "pinned by the hint that came through the router"


def test_a_server_that_dies_under_load_makes_no_answer_wrong(routed: Routed) -> None:
    """Its requests are sent to the other; once it is back, the router finds it again."""
    right = [routed.ask(tokens).json()["output_ids"] for tokens in PROMPTS]
    victim = routed.servers[0]
    ended = threading.Event()

    def load(client: int) -> list[tuple[int, httpx.Response]]:
        answers = []
        while not ended.is_set():
            number = (client + len(answers)) % len(PROMPTS)
            answers.append((number, routed.ask(PROMPTS[number])))
        return answers

    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(load, client) for client in range(4)]
        try:
            victim._end()
            wait_until(lambda: not routed.workers()[victim.base_url])
            victim.spawn()
            victim.wait_ready()
            wait_until(lambda: routed.workers()[victim.base_url])
        finally:
            ended.set()
    answers = [answer for each in loads for answer in each.result()]
    served = [(number, answer.json()) for number, answer in answers if answer.status_code == 200]
    assert all(answer["output_ids"] == right[number] for number, answer in served)
    failed = [answer.text for _, answer in answers if answer.status_code != 200]
    assert len(failed) <= 4, failed  # no more than were under way when it died
