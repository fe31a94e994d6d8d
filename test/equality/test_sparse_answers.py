"""Answers from chosen pages: the same wherever pages are, and never the ground of an exact answer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.nightly_cases import rest_nightly
from support.python_path import FAULTS, python_path
from support.servers import ServerProcess
from support.tiered import tiered_server
from support.workloads.exchanges import LONG_ANSWER_TOKENS, POOL_TOKENS, Exchange, ask_at_once

pytestmark = pytest.mark.server

# The last tokens of prompts select, too: what they leave behind would be found by the next turn.
SPARSE = (
    *("--kv-sparse-selector", "bits", "--kv-sparse-budget", "80", "--kv-sparse-min-context", "64"),
    *("--kv-sparse-prompt-tokens", "40"),
)
EXACT = {"selector": "all"}

# A few of the long answers, which make requests retract each other, and others; of those that are asked alone
# an exact answer follows behind all but most of the long ones, and some are asked with room for every page.
FIRST_OF_THE_LONG, LONG_ALONE, WITH_EVERYTHING = 8, 1, 8


def ask(server: ServerProcess, exchange: Exchange, hints: dict[str, Any] | None = None) -> list[int]:
    body: dict[str, Any] = {
        "input_ids": list(exchange.prompt),
        # Not ``ignore_eos``, which keeps a request from being retracted (``exchanges.ask``).
        "sampling_params": {"temperature": 0, "max_new_tokens": len(exchange.answer)},
    }
    return list(server.post("/generate", body | ({"kv_hints": hints} if hints else {}))["output_ids"])


def answers(server: ServerProcess, exchanges: Sequence[Exchange], concurrency: int) -> list[list[int]]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda exchange: ask(server, exchange), exchanges))


def sparse_then_exact(
    server: ServerProcess, exchanges: Sequence[Exchange]
) -> tuple[list[list[int]], list[list[int]]]:
    """Each exchange twice in a row: what the first request leaves behind is there for the second."""
    pairs = [(ask(server, exchange), ask(server, exchange, EXACT)) for exchange in exchanges]
    return [sparse for sparse, _ in pairs], [exact for _, exact in pairs]


def number_differing(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int:
    return sum(list(one) != list(other) for one, other in zip(some, others, strict=True))


def check_equal(
    server: ServerProcess,
    asked: Sequence[Exchange],
    some: Sequence[Sequence[int]],
    alone: Sequence[Sequence[int]],
) -> None:
    """Of hundreds of answers one may part from what came alone, if it comes alone, too, behind a prefix.

    What is computed in other parts is rounded otherwise, and of two pages as good as each other one is read.
    """
    differing = [place for place, answer in enumerate(some) if list(answer) != list(alone[place])]
    print(f"answers that differ: {differing} of {len(asked)}")
    assert len(differing) <= len(asked) / 100
    assert all(comes_alone(server, asked[place], list(some[place])) for place in differing)


def comes_alone(server: ServerProcess, exchange: Exchange, answer: list[int]) -> bool:
    for found in range(16, len(exchange.prompt), 16):
        server.flush_cache()
        ask(server, Exchange(exchange.prompt[: found + 1], (0,)), EXACT)
        if ask(server, exchange) == answer:
            return True
    return False


@pytest.mark.parametrize(("others", "pool_tokens"), rest_nightly([(4, 1024), (500, POOL_TOKENS)]))
def test_where_pages_are_changes_no_token_and_exact_answers_stay_exact(
    random_model: Path, exchanges: list[Exchange], others: int, pool_tokens: int
) -> None:
    """Over evictions and retractions, alone and together, cold and warm; by night with more slots, too."""
    long = [exchange for exchange in exchanges if len(exchange.answer) == LONG_ANSWER_TOKENS]
    asked = long[:FIRST_OF_THE_LONG] + exchanges[:others]
    alone_first = asked[: FIRST_OF_THE_LONG - LONG_ALONE]
    twice = asked[len(alone_first) :]
    exact = [exchange.answer for exchange in asked]
    some = exchanges[:WITH_EVERYTHING]
    pool = ("--max-total-tokens", str(pool_tokens))
    with tiered_server(random_model, *SPARSE, *pool, "--kv-device-tokens", "640") as server:
        alone = answers(server, alone_first, 1)
        sparse, exact_behind = sparse_then_exact(server, twice)
        alone += sparse
        replies = ask_at_once(server, asked)
        everything = [ask(server, exchange, {"budget": 1e6}) for exchange in some]
        pages = server.get("/kv_importance?limit=1")["pages"]
        check_equal(server, asked, [reply["output_ids"] for reply in replies], alone)
    print(f"{number_differing(alone, exact)} of {len(asked)} answers are not the exact ones; {pages}")
    assert number_differing(exact_behind, exact[len(alone_first) :]) == 0
    assert number_differing(everything, [exchange.answer for exchange in some]) == 0
    # Else none of this would say anything.
    assert sum(reply["meta_info"]["num_retractions"] for reply in replies) > 0
    assert number_differing(alone, exact) > len(asked) / 10
    assert 0 < pages["selected"] < pages["candidates"]
    if others < 500:
        return
    elsewhere = ("--kv-device-tokens", "1600")
    with tiered_server(random_model, *SPARSE, *elsewhere) as server:
        with_more_slots = answers(server, asked, 4)
        more = server.get("/kv_importance?limit=1")["pages"]
        check_equal(server, asked, with_more_slots, alone)
    assert more["device_tokens_per_layer"] > 2 * pages["device_tokens_per_layer"]


@pytest.mark.nightly
def test_what_a_sparse_request_leaves_in_the_tree_would_change_exact_answers(
    random_model: Path, exchanges: list[Exchange]
) -> None:
    asked = exchanges[:20]
    with tiered_server(
        random_model, *SPARSE, "--kv-device-tokens", "640", env=python_path(FAULTS / "kv_sparse_fault")
    ) as server:
        _, exact_behind = sparse_then_exact(server, asked)
    assert number_differing(exact_behind, [exchange.answer for exchange in asked]) > 0
