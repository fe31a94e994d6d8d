"""Servers that are killed while they write, beside a server that goes on, all on one directory."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from sgl_importance.storage.inspect import files_of, verify

from support.servers import ServerFailed, ServerProcess
from support.store_bench import PROMPTS, Bench, answer, count, fault_env, report, store_flags, wait_for_memory

pytestmark = pytest.mark.server

# Room for about a third of the prompts: the servers to be killed evict what the other reads.
BUDGET_BYTES = 7_000_000
CLIENTS = 4


def wrong_answers(
    server: ServerProcess, indices: list[int], expected: list[list[int]]
) -> tuple[int, int, int]:
    """Wrong answers, answers, and prompt tokens from storage; an end of the server in between is no error."""

    def ask(index: int) -> tuple[bool, int] | None:
        try:
            reply = answer(server, index)
        except (httpx.TransportError, httpx.HTTPStatusError, ServerFailed):
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
        os.killpg(server.pid, signal.SIGKILL)
        wrong, _, _ = asking.result(timeout=60)
    return wrong


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.nightly)])
def test_killed_servers_leave_nothing_wrong(
    bench: Bench, models: list[Path], references: list[list[list[int]]], kills: int
) -> None:
    """Each killed server is the restart of the one before; one server goes on beside them all."""
    rng, expected, everything = random.Random(kills), references[0], list(range(PROMPTS))
    store, survivor = bench.disk.store, bench.server
    flags = (*store_flags(store), "--kv-importance-store-bytes", str(BUDGET_BYTES))
    served_to_survivor = served_to_rivals = 0
    assert wrong_answers(survivor, everything, expected)[:2] == (0, PROMPTS)
    came, lost = bench.count("neighbours"), bench.count("lost_neighbours")
    for kill in range(1, kills + 1):
        wait_for_memory()
        with ServerProcess(*flags, model=models[0], env=fault_env(bench.disk.control)) as rival:
            wrong, answers, served = wrong_answers(rival, rng.sample(everything, 30), expected)
            assert (wrong, answers) == (0, 30)
            served_to_rivals += served
            if kill > 1:
                assert count(rival, "lost_neighbours") >= 1, "the restart saw nothing of the kill before"
            with ThreadPoolExecutor(1) as pool:
                killing = pool.submit(kill_while_writing, rival, expected, rng)
                wrong, answers, _ = wrong_answers(survivor, rng.sample(everything, 30), expected)
                assert (wrong, answers) == (0, 30)
                assert killing.result(timeout=120) == 0
        bench.flush()
        wrong, answers, served = wrong_answers(survivor, everything, expected)
        assert (wrong, answers) == (0, PROMPTS)
        served_to_survivor += served
        assert bench.wait_for("neighbours", came + kill) == came + kill
        assert bench.wait_for("lost_neighbours", lost + kill) == lost + kill
    assert served_to_survivor > 0
    assert served_to_rivals > 0, "a restarted server found nothing"
    result = verify(store, quarantine=False, files=files_of(store), advance=lambda size: None)
    assert result.pages > 0
    assert result.damaged == {}
    report(
        f"SIGKILL while writing, {kills} times, then restarts",
        "store verify: none damaged",
        "lost_neighbours",
    )
    report("two servers on one directory, one of them evicting", "each serves the other's", "neighbours")
    bench.empty()  # other tests count on prompts that the survivor has not seen
