"""A driven tree that writes a ledger: stopped, and started again on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_importance.placement.prewarm.ledger_plan import plan_from_ledger
from sglang_importance.placement.ledger_contents import LedgerContents
from sglang_importance.placement.ledger_feed import LedgerFeed, model_digest
from sglang_importance.placement.prewarm_request import new_rid
from sglang_importance.storage.weights import WATCH, Weights

from support.drivers.tree_driver import PAGE, TreeDriver
from support.workloads.ledger_rows import open_ledger

WEIGHTS = Weights("fingerprint", "default", "config", pages_match=True)
POOL = 4096

_feeds: list[LedgerFeed] = []


@contextmanager
def weights_loaded(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Weights as a scheduler has them: ledgers are written. Those still open are closed at the end."""
    patch.setattr(WATCH, "current", WEIGHTS)
    yield
    # An open feed waits for the end of the process, and its tree with it.
    for feed in _feeds:
        feed.close()
    _feeds.clear()


def start(path: Path, *, tokens: int = POOL, keeps_pins: bool = False, **settings: Any) -> TreeDriver:
    """A cache on the ledger in a file, as a server is at its start."""
    driver = TreeDriver(tokens=tokens)
    ledger = open_ledger(path, model_digest(WEIGHTS, PAGE), **settings)
    component = driver.component
    state = component.state
    contents = LedgerContents.read(ledger, state.tree.ghosts.capacity_pages)
    restored = contents.restore(state, component.pins if keeps_pins else None)
    feed = LedgerFeed(ledger, state.tree, state.policy, weights=WEIGHTS, budget_bytes=1 << 28, pins=restored)
    component.attach_ledger(feed)
    _feeds.append(feed)
    return driver


def serve(driver: TreeDriver, prompt: list[int], answer: int = 3) -> None:
    request = driver.admit(prompt)
    pages = -(-len(prompt) // PAGE)
    driver.prefill(request, body=np.full(pages, 1 / pages))
    driver.decode(request, [prompt[0] + 7] * answer)
    driver.finish(request)


def prewarm(driver: TreeDriver, tokens: list[int]) -> None:
    request = driver.admit(tokens)
    request.rid = new_rid()
    driver.prefill(request)
    driver.decode(request, [1])
    driver.finish(request)


def prewarm_from_ledger(driver: TreeDriver) -> int:
    """As the server does at its start; returns the number of nodes."""
    ledger = open_ledger(driver.component.ledger.place, model_digest(WEIGHTS, PAGE))
    paths = plan_from_ledger(
        ledger,
        driver.component.state.policy.cost,
        use_importance=True,
        has_storage=False,
        present=(),
        max_tokens=POOL,
        max_seconds=1e9,
    )
    ledger.close()
    for path in paths:
        for end in path.ends:
            prewarm(driver, [*path.token_ids[:end], 0])
    return sum(len(path.ends) for path in paths)
