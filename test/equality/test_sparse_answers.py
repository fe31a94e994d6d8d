"""Answers from chosen pages: the same wherever pages are, and never the ground of an exact answer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.python_path import FAULTS, python_path
from support.servers import ServerProcess
from support.tiered import tiered_server
from support.workloads.exchanges import Exchange

pytestmark = pytest.mark.server

# The last tokens of prompts select, too: what they leave behind would be found by the next turn.
SPARSE = (
    *("--kv-sparse-selector", "rep", "--kv-sparse-budget", "80", "--kv-sparse-min-context", "64"),
    *("--kv-sparse-prompt-tokens", "40"),
)
EXACT = {"selector": "all"}
MANY = 140


def answers(
    server: ServerProcess, exchanges: Sequence[Exchange], hints: dict[str, Any] | None, concurrency: int
) -> list[list[int]]:
    def ask(exchange: Exchange) -> list[int]:
        tokens = len(exchange.answer)
        body: dict[str, Any] = {
            "input_ids": list(exchange.prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        reply = server.post("/generate", body | ({"kv_hints": hints} if hints else {}))
        return list(reply["output_ids"])

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, exchanges))


def number_differing(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int:
    return sum(list(one) != list(other) for one, other in zip(some, others, strict=True))


def test_where_pages_are_changes_no_token_and_exact_answers_stay_exact(
    random_model: Path, exchanges: list[Exchange]
) -> None:
    """Over evictions and retractions, alone and together, cold and warm."""
    asked = exchanges[len(exchanges) // 2 :][:MANY]  # with the long answers
    exact = [exchange.answer for exchange in asked]
    with tiered_server(random_model, *SPARSE, "--kv-device-tokens", "640") as server:
        alone = answers(server, asked, None, 1)
        together = answers(server, asked, None, 8)
        mended = answers(server, asked, EXACT, 8)
        everything = answers(server, asked, {"budget": 1e6}, 1)
        pages = server.get("/kv_importance?limit=1")["pages"]
    with tiered_server(random_model, *SPARSE, "--kv-device-tokens", "1600") as server:
        with_more_slots = answers(server, asked, None, 4)
        more = server.get("/kv_importance?limit=1")["pages"]
    print(f"{number_differing(alone, exact)} of {len(asked)} answers are not the exact ones; {pages}; {more}")
    assert number_differing(together, alone) == 0
    assert number_differing(with_more_slots, alone) == 0
    assert more["device_tokens_per_layer"] > 2 * pages["device_tokens_per_layer"]
    assert number_differing(mended, exact) == 0
    assert number_differing(everything, exact) == 0
    # Else none of this would say anything.
    assert number_differing(alone, exact) > len(asked) / 10
    assert 0 < pages["selected"] < pages["candidates"]


def test_what_a_sparse_request_leaves_in_the_tree_would_change_exact_answers(
    random_model: Path, exchanges: list[Exchange]
) -> None:
    asked = exchanges[:60]
    with tiered_server(
        random_model, *SPARSE, "--kv-device-tokens", "640", env=python_path(FAULTS / "kv_sparse_fault")
    ) as server:
        answers(server, asked, None, 1)
        after = answers(server, asked, EXACT, 1)
    assert number_differing(after, [exchange.answer for exchange in asked]) > 0
