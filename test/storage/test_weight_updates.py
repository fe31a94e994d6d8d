"""Weights that change under a running server: no page of the old ones is served, whoever brings the new."""

from __future__ import annotations

from pathlib import Path

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
