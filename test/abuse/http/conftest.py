"""One server for everything that is done to it, and what a server without a cache answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.config_file import config_flags
from support.models import write_random_llama
from support.servers import ServerProcess
from support.workloads.exchanges import Exchange, ask

PAGE = 16
POOL = 2048
"""Tokens of the device tier; the prompts whose answers are compared hold twice as many."""
DOCUMENTS, QUESTIONS = 8, 5
ANSWER_TOKENS = 8


@pytest.fixture(scope="session")
def random_model(probe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("random-llama"), tokenizer_of=probe_model)


def _prompts() -> list[list[int]]:
    rng = random.Random(18)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(300, 1000) for _ in range(rng.randint(low, high))]

    documents = [tokens(300, 700) for _ in range(DOCUMENTS)]
    prompts = [document + tokens(4, 40) for document in documents for _ in range(QUESTIONS)]
    rng.shuffle(prompts)
    return prompts


@pytest.fixture(scope="session")
def exchanges(random_model: Path) -> list[Exchange]:
    """Prompts that share prefixes, each with the tokens that stock sglang answers without a radix cache."""
    flags = ("--kv-policy", "default", "--disable-radix-cache", "--max-total-tokens", "8192")
    with ServerProcess(*flags, model=random_model) as server:
        return [
            Exchange(tuple(prompt), tuple(ask(server, prompt, ANSWER_TOKENS)["output_ids"]))
            for prompt in _prompts()
        ]


@pytest.fixture(scope="session")
def server(
    random_model: Path, exchanges: list[Exchange], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Under ``importance``, with three tiers and a ledger, and without a key: everything can be reached."""
    flags = [
        *("--kv-policy", "importance", "--page-size", str(PAGE)),
        *config_flags(signal={"g": "on"}),
        *("--max-total-tokens", str(POOL), "--enable-hierarchical-cache", "--hicache-ratio", "2"),
        *("--kv-importance-store", str(tmp_path_factory.mktemp("store"))),
    ]
    with ServerProcess(*flags, model=random_model) as process:
        yield process


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    """Sends anything, and gives answers back as they are."""
    with httpx.Client(base_url=server.base_url, trust_env=False, timeout=120) as client:
        yield client
