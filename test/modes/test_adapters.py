"""LoRA adapters: each has pages of its own, in memory and in the store, under a name that a restart keeps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sgl_importance.metrics_table import PREFIX

from support.families import VOCABULARY
from support.kept import wait_until_kept
from support.models import write_random_adapter, write_random_llama
from support.prewarms import ended
from support.python_path import CHECKS, python_path
from support.servers import ServerProcess

pytestmark = pytest.mark.server

COMMON = (
    *("--skip-tokenizer-init", "--page-size", "16", "--max-running-requests", "4"),
    *("--context-length", "2048", "--attention-backend", "torch_native", "--lora-backend", "torch_native"),
)
PREFIX_TOKENS = 96
NAMES = (None, "one", "two")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("random-llama"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags of a server with two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    paths = {name: write_random_adapter(folder / name, model, seed) for seed, name in enumerate(NAMES[1:])}
    return ("--enable-lora", "--lora-paths", *(f"{name}={path}" for name, path in paths.items()))


@pytest.fixture(scope="module")
def requests() -> list[tuple[str | None, list[int]]]:
    """Three prefixes, asked about by the model and by both adapters, twice each, in any order."""
    rng = random.Random(0)
    prefixes = [rng.choices(range(10, VOCABULARY), k=PREFIX_TOKENS) for _ in range(3)]
    asked = [
        (name, [*prefix, *tail]) for prefix in prefixes for tail in ([7] * 5, [8] * 20) for name in NAMES
    ]
    return rng.sample(asked, len(asked))


def asked(server: ServerProcess, name: str | None, prompt: list[int]) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "lora_path": name}
    return server.post("/generate", body)


@pytest.mark.tested(
    kind="mode",
    name="`--enable-lora`: ledger, pre-warm and verified store over a restart",
    mode="page scores from attention",
    backend="torch_native",
)
def test_pages_of_adapters_are_never_mixed(
    model: Path, adapters: tuple[str, ...], requests: list[tuple[str | None, list[int]]], tmp_path: Path
) -> None:
    with ServerProcess(
        "--kv-policy", "default", "--disable-radix-cache", *COMMON, *adapters, model=model
    ) as stock:
        answers = [asked(stock, *request)["output_ids"] for request in requests]
    of_prompt = {tuple(prompt): set() for _, prompt in requests}
    for (_, prompt), answer in zip(requests, answers, strict=True):
        of_prompt[tuple(prompt)].add(tuple(answer))
    assert all(len(each) == len(NAMES) for each in of_prompt.values()), "the adapters change nothing"

    flags = (
        *(
            "--kv-policy",
            "importance",
            *COMMON,
            *adapters,
            "--max-total-tokens",
            "512",
            "--hicache-ratio",
            "3",
        ),
        *("--kv-importance-store", str(tmp_path / "store")),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": PREFIX_TOKENS // 2})),
    )
    env = python_path(CHECKS / "tree_check")
    with ServerProcess(*flags, model=model, env=env) as server:
        replies = [asked(server, *request) for request in requests]
        assert [reply["output_ids"] for reply in replies] == answers
        assert sum(reply["meta_info"]["cached_tokens"] for reply in replies) >= 5 * PREFIX_TOKENS
        assert server.metric(f"{PREFIX}evicted_tokens_total", tier="device") > 0
        assert server.metric(f"{PREFIX}folds_total") > 0
        before = {row["extra_key"] for row in prompts_of_nodes(server)}
        assert len(before) == len(NAMES)
        server.flush_cache()
        wait_until_kept(server)
        server.kill_launcher()

    with ServerProcess(*flags, model=model, env=env) as server:
        job = ended(server)
        assert (job["state"], job["refused_tokens"]) == ("done", 0)
        assert job["hit_tokens"]["storage"] > 0
        assert {row["extra_key"] for row in prompts_of_nodes(server)} <= before
        replies = [asked(server, *request) for request in requests]
        assert [reply["output_ids"] for reply in replies] == answers
        assert sum(reply["meta_info"]["cached_tokens_details"].get("storage", 0) for reply in replies) > 0
        server.flush_cache()


def prompts_of_nodes(server: ServerProcess) -> list[dict[str, Any]]:
    nodes = server.get("/kv_importance", limit=1000)["nodes"]
    return [server.get(f"/kv_importance/node/{node['id']}/prompt") for node in nodes]
