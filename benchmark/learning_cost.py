"""What learning costs the scheduler's thread: life tables and ghosts, on the real tree.

    python benchmark/learning_cost.py

Processor time of the calling thread inside the calls that learn (``ReuseTracker``, ``TurnTracker``, the
hashing of what becomes a ghost, and the clock of ``ReuseEstimator`` with the index that follows), while 1, 64
and 256 requests run at a time: a shared cached prefix, 32 new tokens each, a full pool, so that each new node
drives an old one out. No end of an answer is known there: turns
are followed (``follows_turns``), and rank nothing. ``a_request`` is the median life of a request in
microseconds, and ``parts`` what each call takes of it on average; ``a_step`` is what of it falls on a decode
step of so many running requests whose answers have ``ANSWER_TOKENS`` tokens, an assumption. What the two
clocks around a call cost is taken off.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer
from results import RESULTS, print_rows, write_results
from rich.progress import track
from scheduler_cost import Tree

from sgl_importance.nodes.reuse_tracker import ReuseTracker
from sgl_importance.nodes.turn_tracker import TurnTracker
from sgl_importance.reuse.estimator import ReuseEstimator
from sglang_importance.tree.annotated_tree import AnnotatedTree

RUNNING = (1, 64, 256)
ANSWER_TOKENS = 256
LEARNING = {
    ReuseTracker: ("created", "accessed", "ended", "answered", "holds", "split"),
    AnnotatedTree: ("removed",),
    TurnTracker: ("finished", "told"),
    ReuseEstimator: ("tick",),
}


class Clock:
    """Nanoseconds inside outermost calls, and how many there were, by name."""

    def __init__(self) -> None:
        self._nanoseconds: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._is_inside = False

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return call(*args, **kwargs)
            self._is_inside = True
            start = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self._nanoseconds[name] += time.thread_time_ns() - start
                self._calls[name] += 1
                self._is_inside = False

        return wrapped

    def read(self, cost: float = 0.0) -> tuple[Counter[str], int]:
        """Nanoseconds since the last look, by name, without ``cost`` of them a call; and all calls."""
        spent = Counter({name: self._nanoseconds[name] - cost * calls for name, calls in self._calls.items()})
        calls = self._calls.total()
        self._nanoseconds.clear()
        self._calls.clear()
        return spent, calls


@contextmanager
def learning_timed() -> Iterator[Clock]:
    clock = Clock()
    with ExitStack() as stack:
        for owner, names in LEARNING.items():
            for name in names:
                call = clock.timed(f"{owner.__name__}.{name}", getattr(owner, name))
                stack.enter_context(patch.object(owner, name, call))
        yield clock


def cost_of_a_clock() -> float:
    """Nanoseconds that an empty call measures."""
    clock = Clock()
    empty = clock.timed("empty", lambda: None)
    for _ in range(20_000):
        empty()
    spent, calls = clock.read()
    return spent.total() / calls


def main(
    requests: Annotated[int, typer.Option(min=64, help="In all, of each number that run at a time.")] = 2048,
    out: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "learning_cost.json",
) -> None:
    """Measures and writes the JSON."""
    rows: list[dict[str, Any]] = []
    for running in RUNNING:
        tree = Tree(running)
        while not len(tree.driver.component.state.tree.ghosts):
            tree.lives()
        lives, calls_of, parts = [], [], Counter[str]()
        with learning_timed() as clock:
            cost = cost_of_a_clock()
            # The index follows every 16 requests, so a life of fewer is counted with those around it.
            batch = max(running, 64)
            gc.collect()
            gc.freeze()  # as sglang does behind its warm-up: what it has loaded is not looked at again
            for _ in track(range(max(requests // batch, 3)), description=f"{running} running"):
                for _ in range(batch // running):
                    tree.lives()
                nanoseconds, calls = clock.read(cost)
                lives.append(nanoseconds.total() / batch / 1e3)
                calls_of.append(calls / batch)
                if len(lives) > 1:
                    parts += nanoseconds
        turns = tree.driver.component.state.policy.turns
        a_request = float(np.median(lives[1:]))
        rows.append(
            {
                "running": running,
                "calls_of_a_request": float(np.median(calls_of[1:])),
                "follows_turns": bool(turns._turns),
                "a_request": a_request,
                "low": float(np.quantile(lives[1:], 0.1)),
                "high": float(np.quantile(lives[1:], 0.9)),
                "answer_tokens": ANSWER_TOKENS,
                "a_step": a_request * running / ANSWER_TOKENS,
                "parts": {
                    name: nanoseconds / (len(lives) - 1) / batch / 1e3
                    for name, nanoseconds in parts.most_common()
                },
            }
        )
    shown = [{name: value for name, value in row.items() if name != "parts"} for row in rows]
    print_rows("learning on the scheduler's thread, microseconds", shown)
    typer.echo(f"written to {write_results('learning_cost', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)
