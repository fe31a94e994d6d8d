"""Endurance: does memory stay flat, and do our accounts stay in step with upstream's?

    python benchmark/soak.py                                      # 100,000 operations on the real tree
    python benchmark/soak.py --operations 0 --requests 2000       # a real server under mixed HTTP load

Tree: every operation is followed by what a scheduler does between batches; every ``check_every`` operations
all accounts are compared (`test/tree/books.py`), every ``idle_every`` upstream's own check runs on the idle
tree and memory is measured. The run ends at the first disagreement.
"""

from __future__ import annotations

import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from results import print_rows, write_results
from rich.progress import Progress

TEST = Path(__file__).parents[1] / "test"
sys.path[:0] = [str(TEST), str(TEST / "tree")]

ARMS = (
    ("importance", "write_through"),
    ("importance", "write_through_selective"),
    ("importance", "write_back"),
    ("observe", "write_through"),
)


def slope(operations: list[int], values: list[float]) -> tuple[float, float]:
    """Least-squares growth per 1,000 operations over the second half, and its standard error."""
    x = np.array(operations[len(operations) // 2 :], dtype=float) / 1000
    y = np.array(values[len(values) // 2 :], dtype=float)
    x -= x.mean()
    growth = float(x @ y / (x @ x))
    rest = y - y.mean() - growth * x
    return growth, float(np.sqrt(rest @ rest / max(len(x) - 2, 1) / (x @ x)))


def soak_tree(kind: str, write_policy: str, operations: int, seed: int, bar: Any) -> dict[str, Any]:
    """One arm; raises AssertionError where two accounts disagree."""
    from soak_history import Soak

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(kind, write_policy, seed=seed, record_to=Path(folder))
        for done in soak.run(operations, check_every=100, idle_every=500):
            bar(done)
        events = soak.close()
    points = soak.checkpoints
    steps = [point.operations for point in points]
    growth, error = slope(steps, [point.rss / 2**20 for point in points])
    objects, objects_error = slope(steps, [point.objects["all"] for point in points])
    return {
        "mode": "tree",
        "policy": kind,
        "write_policy": write_policy,
        "operations": operations,
        "seconds": round(time.perf_counter() - start, 1),
        "requests": soak.happened["admit"],
        "kv_tokens_checked": soak.driver.checked_tokens,
        "rss_mib": round(points[-1].rss / 2**20, 1),
        "rss_kib_per_1000_operations": round(1024 * growth, 2),
        "rss_standard_error": round(1024 * error, 2),
        "objects_per_1000_operations": round(objects, 2),
        "objects_standard_error": round(objects_error, 2),
        "happened": dict(soak.happened),
        "prompts": dict(soak.traffic.drawn),
        "events": events,
        "book_checks": operations // 100 + len(points),
        "sanity_checks": len(points),
    }


def main(
    operations: Annotated[int, typer.Option(min=0, help="tree operations, over all arms")] = 100_000,
    requests: Annotated[int, typer.Option(min=0, help="requests to a real server; 0 starts none")] = 0,
    max_seconds: Annotated[float, typer.Option(help="of the server's load")] = 600.0,
    seed: Annotated[int, typer.Option(help="decides every operation")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file")] = None,
) -> None:
    rows: list[dict[str, Any]] = []
    with Progress() as progress:
        share = operations // len(ARMS)
        for number, (kind, write_policy) in zip(range(len(ARMS) if share else 0), cycle(ARMS), strict=False):
            task = progress.add_task(f"{kind}, {write_policy}", total=share)
            rows.append(
                soak_tree(
                    kind,
                    write_policy,
                    share,
                    seed + number,
                    lambda done, task=task: progress.update(task, completed=done),
                )
            )
    if requests:
        from soak_server import soak_server

        rows.append(soak_server(requests, max_seconds=max_seconds, seed=seed))
    shown = (
        "mode",
        "policy",
        "operations",
        "seconds",
        "rss_mib",
        "rss_kib_per_1000_operations",
        "rss_standard_error",
    )
    print_rows("Soak", [{name: row.get(name, "") for name in shown} for row in rows])
    print(write_results("soak", rows, out=out))


if __name__ == "__main__":
    typer.run(main)
