"""Weights that change under a running server: no page of the old ones is served, whoever brings the new."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from support.store_bench import PAGE_TOKENS, PROMPT_PAGES, Bench, report
from support.weight_updates import UPDATES

pytestmark = pytest.mark.server


@pytest.mark.parametrize("way", UPDATES)
def test_pages_of_other_weights_are_never_served(bench: Bench, models: list[Path], way: str) -> None:
    """Tokens are compared with those of a server without any cache that has the same weights."""
    update = UPDATES[way]
    index, during = bench.fresh(), bench.fresh()
    bench.store_prompt(index)
    updates = bench.count("weight_updates")
    unwritten = bench.count("unwritten_pages", reason="weights")

    update(bench.server, models[1], flush_cache=False)
    bench.model = 1
    try:
        # Nothing in memory can be trusted to be of the new weights: nothing of it is stored.
        bench.ask(during)
        bench.wait_for("unwritten_pages", unwritten + 1, reason="weights")
        bench.flush()
        assert bench.ask(index) == 0, "a page of the old weights was served"
        assert bench.ask(during) == 0
        bench.flush()
        assert bench.ask(index) == PROMPT_PAGES * PAGE_TOKENS
        assert bench.count("weight_updates") == updates + 1
        report(f"weights updated from {way}, cache not flushed", "old pages unreachable", "weight_updates")
    finally:
        bench.flush()  # an update that cannot flush ends the server
        update(bench.server, models[0], flush_cache=True)
        bench.model = 0
    assert bench.ask(index) == PROMPT_PAGES * PAGE_TOKENS, "the first weights have their pages still"
    report(
        f"weights updated from {way}, cache flushed", "old pages wait for the old weights", "weight_updates"
    )


def test_weights_change_when_nothing_runs_any_more(bench: Bench, models: list[Path]) -> None:
    """sglang cannot flush the cache below a request, and ends: a client has left, or a pause holds one."""
    update = {"model_path": str(models[0])}
    body = {
        "input_ids": list(range(100, 140)),
        "sampling_params": {"max_new_tokens": 200, "ignore_eos": True},
        "stream": True,
    }
    with httpx.Client(base_url=bench.server.base_url, trust_env=False, timeout=120) as client:
        for number in range(4):  # the abort of who has left and the update are under way together
            with client.stream("POST", "/generate", json=body) as left:
                for _ in zip(range(number + 1), left.iter_lines(), strict=False):
                    pass
            answer = client.post("/update_weights_from_disk", json=update)
            assert answer.status_code == 200, answer.text
        with client.stream("POST", "/generate", json=body) as held:
            lines = held.iter_lines()
            next(lines)
            client.post("/pause_generation", json={"mode": "in_place"}).raise_for_status()
            try:
                answer = client.post("/update_weights_from_disk", json=update)
                kept = client.post("/update_weights_from_disk", json={**update, "flush_cache": False})
            finally:
                client.post("/continue_generation", json={}).raise_for_status()
            assert (answer.status_code, kept.status_code) == (400, 200), answer.text
            assert "pause with mode retract or abort" in answer.text
            assert [line for line in lines if line][-1] == "data: [DONE]"
    bench.flush()
