"""What a policy without page scores asks of a device and of the scheduler's thread, counted on a CPU.

    python benchmark/kernels/source_none.py --json FILE

Requests of a shared prefix go through the real radix tree as a scheduler sends them: ours under ``--kv-
policy importance`` with ``--kv-importance-source none``, and stock's Python core. Launches and waits are
counted by a dispatch mode; microseconds are processor time of the calling thread, medians over rounds. A
forward pass has one hook of ours, around ``process_batch_result``; it is counted and timed around a
function that does nothing. Attention backend, graphs and sampling are stock's own, untouched.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402

import typer

from benchmark.results import print_rows, write_results
from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.tree.deferred_work import DeferredWork

from support.device_counts import DeviceCounts
from support.drivers.tree_driver import TreeDriver

RUNNING = (1, 64, 256)
PAGE, PREFIX, NEW, ANSWER = 16, 256, 32, 8
CALLS = 20_000
KINDS = {"importance": "importance", "stock": "python-lru"}


class Lives:
    """Whole lives of requests in one tree."""

    def __init__(self, kind: str, running: int) -> None:
        tokens = 4 * (PREFIX + running * 64)
        options = ImportanceOptions(policy="importance", source="none") if kind == "importance" else None
        self.driver = TreeDriver(
            KINDS[kind],
            tokens=tokens,
            page_size=PAGE,
            requests=running + 1,
            options=options,  # type: ignore[arg-type]
        )
        self.running, self._number = running, 0
        self.serve()

    def serve(self) -> float:
        """One life of each; seconds of the thread."""
        driver, prompts = self.driver, []
        for _ in range(self.running):
            self._number += 1
            first = 10_000 + 100 * self._number
            prompts.append([*range(PREFIX), *range(first, first + NEW)])
        start = time.thread_time()
        requests = []
        for prompt in prompts:
            requests.append(driver.admit(prompt))
            driver.prefill(requests[-1])
        for request in requests:
            driver.decode(request, [7] * ANSWER)
            driver.finish(request)
        return time.thread_time() - start

    def counted(self) -> DeviceCounts:
        """One life of each, counted."""
        counts = DeviceCounts()
        with counts.counting():
            self.serve()
        return counts


def per_pass(running: int) -> dict[str, Any]:
    """What is done once a forward pass."""
    batch = [object()] * running

    def nothing(*_: Any) -> None:
        pass

    def seconds(call: Callable[..., None]) -> float:
        start = time.thread_time()
        for _ in range(CALLS):
            call(batch, None)
        return (time.thread_time() - start) / CALLS

    hooked, counts = DeferredWork().around(nothing), DeviceCounts()
    with counts.counting():
        hooked(batch, None)
    added = median(seconds(hooked) - seconds(nothing) for _ in range(7))
    return {
        "pass_launches": sum(counts.launches.values()),
        "pass_syncs": sum(counts.syncs.values()),
        "pass_us": 1e6 * added,
    }


def measured(running: int, rounds: int) -> dict[str, Any]:
    lives = {kind: Lives(kind, running) for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, life in lives.items():  # in turns: what else runs here slows both
            times[kind].append(life.serve())
    counts = {kind: life.counted() for kind, life in lives.items()}
    row: dict[str, Any] = {"running": running, **per_pass(running)}
    for kind in KINDS:
        row[f"{kind}_launches_per_request"] = sum(counts[kind].launches.values()) / running
        row[f"{kind}_syncs_per_request"] = sum(counts[kind].syncs.values()) / running
        row[f"{kind}_us_per_request"] = 1e6 * median(times[kind]) / running
    added = counts["importance"].launches - counts["stock"].launches
    row["added_launches"] = dict(added)
    row["added_syncs"] = dict(counts["importance"].syncs - counts["stock"].syncs)
    return row


def main(
    json: Annotated[Path | None, typer.Option(help="Write the rows there.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Lives of all requests that are timed.")] = 5,
) -> None:
    rows = [measured(running, rounds) for running in RUNNING]
    if json is not None:
        write_results("source_none", rows, out=json)
    print_rows("Source none", rows)


if __name__ == "__main__":
    typer.run(main)
