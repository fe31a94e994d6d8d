"""Servers that are killed while they write, beside a server that goes on, all on one directory."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from conftest import PROMPTS, STORE, answer, report, store_flags

from sgl_importance.storage.inspect import files_of, verify

from serving import ServerProcess

pytestmark = pytest.mark.server

# Room for about a third of the prompts: each server evicts while the other reads.
BUDGET_BYTES = 7_000_000
CLIENTS = 4


def server_on(store: Path, model: Path) -> ServerProcess:
    flags = (*store_flags(store), "--kv-importance-store-bytes", str(BUDGET_BYTES))
    return ServerProcess(*flags, model=model)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "store"


@pytest.fixture(scope="module")
def survivor(models: list[Path], store: Path) -> Iterator[ServerProcess]:
    """The server that goes on."""
    with server_on(store, models[0]) as server:
        yield server


def count(server: ServerProcess, name: str, **labels: str) -> float:
    try:
        return server.metric(f"{STORE}{name}_total", **labels)
    except KeyError:
        return 0


def wrong_answers(
    server: ServerProcess, indices: list[int], expected: list[list[int]]
) -> tuple[int, int, int]:
    """Wrong answers, answers, and prompt tokens from storage; an end of the server in between is no error."""

    def ask(index: int) -> tuple[bool, int] | None:
        try:
            reply = answer(server, index)
        except (httpx.TransportError, httpx.HTTPStatusError):
            return None
        served = (reply["meta_info"]["cached_tokens_details"] or {}).get("storage", 0)
        return reply["output_ids"] != expected[index], served

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [reply for reply in pool.map(ask, indices) if reply is not None]
    return sum(wrong for wrong, _ in answers), len(answers), sum(served for _, served in answers)


def kill_while_writing(server: ServerProcess, expected: list[list[int]], rng: random.Random) -> int:
    """Kills the server and all its processes at a random moment of a write-heavy run; its wrong answers."""
    indices = rng.choices(range(PROMPTS), k=4 * PROMPTS)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(wrong_answers, server, indices, expected)
        time.sleep(rng.uniform(0.1, 2.5))
        assert server._process is not None
        os.killpg(server._process.pid, signal.SIGKILL)
        wrong, _, _ = asking.result(timeout=60)
    return wrong


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.nightly)])
def test_killed_servers_leave_nothing_wrong(
    survivor: ServerProcess, store: Path, models: list[Path], references: list[list[list[int]]], kills: int
) -> None:
    rng, expected = random.Random(kills), references[0]
    served_to_survivor = 0
    for _ in range(kills):
        with server_on(store, models[0]) as rival, ThreadPoolExecutor(1) as pool:
            killing = pool.submit(kill_while_writing, rival, expected, rng)
            wrong, answers, served = wrong_answers(survivor, rng.sample(range(PROMPTS), 40), expected)
            assert (wrong, answers) == (0, 40)
            assert killing.result(timeout=120) == 0
        survivor.flush_cache()
        wrong, answers, more = wrong_answers(survivor, list(range(PROMPTS)), expected)
        assert (wrong, answers) == (0, PROMPTS)
        served_to_survivor += served + more
        survivor.flush_cache()
    with server_on(store, models[0]) as restarted:
        wrong, answers, served = wrong_answers(restarted, rng.sample(range(PROMPTS), PROMPTS), expected)
        assert (wrong, answers) == (0, PROMPTS)
        assert served > 0, "a restarted server found nothing"
        evicted = count(survivor, "evicted_pages") + count(restarted, "evicted_pages")
    assert served_to_survivor > 0
    assert evicted > 0, "the budget was never reached"
    result = verify(store, quarantine=False, files=files_of(store), advance=lambda size: None)
    assert result.damaged == {}
    # One sixteenth for each of two servers, and what killed ones left unfinished.
    assert sum(file.size for file in files_of(store)) <= BUDGET_BYTES * 9 / 8 + kills * CLIENTS * 25_000
    report(f"SIGKILL while writing, {kills} times, then restarts", "only whole pages found", "missed_pages")
    report("two servers on one directory, both evicting", "each serves the other's pages", "evicted_pages")
