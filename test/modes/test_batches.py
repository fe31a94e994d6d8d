"""Batches of another make than one prefill or one decode step, other number formats, and KV events."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, KVEventBatch

from sgl_importance.metrics_table import PREFIX

from support.families import VOCABULARY
from support.models import write_random_llama
from support.python_path import CHECKS, python_path
from support.servers import ServerProcess, free_port

pytestmark = pytest.mark.server

COMMON = (
    *("--skip-tokenizer-init", "--page-size", "16", "--max-running-requests", "4"),
    *("--context-length", "2048", "--attention-backend", "torch_native"),
)
PREFIX_TOKENS, POOL_TOKENS = 96, 512
MIXED = ("--enable-mixed-chunk", "--chunked-prefill-size", "64", "--num-continuous-decode-steps", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("random-llama"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Six prefixes of six pages, each asked about four times, in any order."""
    rng = random.Random(0)
    prefixes = [rng.choices(range(10, VOCABULARY), k=PREFIX_TOKENS) for _ in range(6)]
    asked = [prefix + rng.choices(range(10, VOCABULARY), k=20) for prefix in prefixes for _ in range(4)]
    return rng.sample(asked, len(asked))


def answers_of(server: ServerProcess, prompts: list[list[int]], *, at_once: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(
            pool.map(lambda prompt: server.generate(prompt, max_new_tokens=12, ignore_eos=True), prompts)
        )


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            MIXED,
            id="mixed",
            marks=pytest.mark.tested(
                name="`--enable-mixed-chunk`, `--num-continuous-decode-steps 2`, `--kv-events-config`"
            ),
        ),
        *(
            pytest.param(
                ("--dtype", dtype),
                id=dtype,
                marks=[pytest.mark.tested(name=f"`--dtype {dtype}`"), pytest.mark.nightly],
            )
            for dtype in ("bfloat16", "float16")
        ),
    ],
)
@pytest.mark.tested(kind="mode", mode="page scores from attention", backend="torch_native")
def test_answers_are_stocks(flags: tuple[str, ...], model: Path, prompts: list[list[int]]) -> None:
    with ServerProcess(
        "--kv-policy", "default", "--disable-radix-cache", *COMMON, *flags, model=model
    ) as stock:
        answers = [each["output_ids"] for each in answers_of(stock, prompts, at_once=1)]
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    events = json.dumps({"publisher": "zmq", "topic": "kv-events", "endpoint": endpoint})
    server = ServerProcess(
        *("--kv-policy", "importance", *COMMON, *flags, "--max-total-tokens", str(POOL_TOKENS)),
        *("--kv-events-config", events),
        model=model,
        env=python_path(CHECKS / "tree_check"),
    )
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber, server:
        subscriber.subscribe("kv-events")
        subscriber.connect(endpoint)
        replies = answers_of(server, prompts, at_once=4)
        assert [reply["output_ids"] for reply in replies] == answers
        assert server.metric(f"{PREFIX}evicted_tokens_total", tier="device") > 0
        nodes = server.get("/kv_importance", limit=1000)["nodes"]
        assert any(node["cross_mass"] > 0 for node in nodes)
        assert server.metric(f"{PREFIX}folds_total") > len(prompts)
        held = sum(node["tokens"] for node in nodes)
        assert stored_tokens(subscriber) == held
        server.flush_cache()


def stored_tokens(subscriber: zmq.Socket) -> int:
    """Tokens that a router which follows the events takes to be in the cache."""
    blocks: dict[int, int] = {}
    removed = 0
    while subscriber.poll(2000):
        *_, payload = subscriber.recv_multipart()
        for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
            if isinstance(event, BlockStored):
                blocks |= dict.fromkeys(event.block_hashes, event.block_size)
            elif isinstance(event, BlockRemoved):
                removed += sum(blocks.pop(block, 0) for block in event.block_hashes)
    assert removed
    return sum(blocks.values())
