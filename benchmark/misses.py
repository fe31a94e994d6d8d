"""What the account of misses costs the scheduler's thread, at 10,000 leaves.

    python benchmark/misses.py

Processor time of the calling thread within the account, per request: the request itself and the nodes that it
brings, cuts and evicts. The pool is full, so that each new text evicts. Every prompt begins with one of 50
shared texts; three of ten were asked for before as a whole. Behind the filling a burst of small nodes leaves;
the first quarter of the requests is served before it is measured. Beside a step of 5 ms, 50 microseconds are
1 %.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import print_rows, write_results
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.observation_options import MissOptions
from sgl_importance.tiers import Tier

from support.drivers.tree_driver import TreeDriver

SHARED_PREFIXES = 50
NEW_TOKENS = 64
FOLLOWED = ("admitted", "given_up", "taken_in", "split", "removed")


class Requests:
    """Requests to a full pool; each shares a beginning with others and ends in text of its own."""

    def __init__(self, leaves: int, page_size: int, prompt_tokens: int, *, memory: float) -> None:
        shared = prompt_tokens - NEW_TOKENS
        self.driver = TreeDriver(
            tokens=leaves * NEW_TOKENS + SHARED_PREFIXES * shared + 4 * prompt_tokens,
            page_size=page_size,
            requests=4,
            max_context=prompt_tokens + 64,
            options=ImportanceOptions(policy="importance", misses=MissOptions(memory=memory)),
        )
        self._random = random.Random(1)
        self._prefixes = [
            [self._random.randrange(32_000) for _ in range(shared)] for _ in range(SHARED_PREFIXES)
        ]
        self._asked: list[list[int]] = []
        self.seconds = 0.0
        misses = self.driver.component.misses
        if misses is not None:
            misses.work_in_background()
            for name in FOLLOWED:
                setattr(misses, name, self._timed(getattr(misses, name)))

    def _timed(self, method: Callable[..., None]) -> Callable[..., None]:
        @wraps(method)
        def timed(*args: Any) -> None:
            start = time.thread_time()
            method(*args)
            self.seconds += time.thread_time() - start

        return timed

    def _text(self, tokens: int) -> list[int]:
        return [self._random.randrange(32_000) for _ in range(tokens)]

    def fill(self) -> int:
        """Serves new texts until they evict; the leaves by then."""
        counters, leaves = self.driver.component.state.counters, self.driver.core.evictable_device_leaves
        while not counters.evicted_from(Tier.DEVICE):
            self.serve(asked_before=0.0)
        return len(leaves)

    def serve(self, asked_before: float = 0.3) -> tuple[float, float]:
        """One request, new or asked before; seconds within the account, and of all that the tree does."""
        if self._random.random() < asked_before:
            tokens = self._random.choice(self._asked)
        else:
            tokens = [*self._random.choice(self._prefixes), *self._text(NEW_TOKENS)]
            self._asked.append(tokens)
        self.seconds, start = 0.0, time.thread_time()
        request = self.driver.admit(tokens)
        self.driver.prefill(request)
        self.driver.decode(request, [5])
        self.driver.finish(request)
        return self.seconds, time.thread_time() - start


def main(
    requests: Annotated[int, typer.Option(min=100, help="Requests of each row.")] = 2000,
    leaves: Annotated[int, typer.Option(min=100, help="Of the full pool.")] = 10_000,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Measures and writes the JSON."""
    rows = []
    for page_size, prompt_tokens in ((1, 512), (16, 512), (64, 4096)):
        served = Requests(leaves, page_size, prompt_tokens, memory=4.0)
        filled = served.fill()
        for _ in range(requests // 4):
            served.serve()
        gc.collect()
        gc.freeze()  # as sglang does behind its warm-up: what it has loaded is not looked at again
        measured = np.array([served.serve() for _ in range(requests)]) * 1e6
        misses = served.driver.component.misses
        assert misses is not None
        misses.settle()
        assert misses.memory is not None, "the account has not failed"
        off = Requests(100, page_size, prompt_tokens, memory=0.0)
        assert off.driver.component.misses is None, "nothing is called where it is off"
        rows.append(
            {
                "page_size": page_size,
                "prompt_tokens": prompt_tokens,
                "leaves": filled,
                "remembered_pages": len(misses.memory),
                "account_median": round(float(np.median(measured[:, 0])), 1),
                "account_mean": round(float(measured[:, 0].mean()), 1),
                "tree_mean": round(float(measured[:, 1].mean()), 1),
            }
        )
    print_rows("scheduler's thread, microseconds per request", rows)
    print(f"written: {write_results('misses', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)
