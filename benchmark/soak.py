"""Endurance: does memory stay flat, and do our accounts stay in step with upstream's?

    python benchmark/soak.py                                      # 100,000 operations on the real tree
    python benchmark/soak.py --operations 0 --requests 2000       # a real server under mixed HTTP load

Tree: requests, some with hints, and pins that come and go. Every operation is followed by what a scheduler
does between batches; every 100 operations all accounts are compared (`books.py` and `soak_placement.py` in
`test/support/drivers`), every 500 upstream's own check runs on the idle tree and memory is
measured. The run ends at the first disagreement.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from growth import known, slope
from results import print_rows, write_results
from rich.progress import track

sys.path.append(str(Path(__file__).parents[1] / "test"))

CHECK_EVERY, IDLE_EVERY = 100, 500  # operations


@dataclass(frozen=True)
class Arm:
    """What one process soaks.

    Attributes:
        uses_g: whether attention moves the ranking.
        recorded: whether a recording is written beside, and added up at the end. Its table of page numbers
            grows until a segment is full, so memory is judged where nothing is recorded.
    """

    kind: str
    write_policy: str
    share: float
    uses_g: bool = False
    recorded: bool = False


ARMS = (
    Arm("importance", "write_through", 0.2),
    Arm("importance", "write_through", 0.1, uses_g=True),
    Arm("importance", "write_through_selective", 0.2, uses_g=True),
    Arm("importance", "write_back", 0.1),
    Arm("importance", "write_back", 0.1, uses_g=True),
    Arm("observe", "write_through", 0.2),
    Arm("importance", "write_through", 0.1, recorded=True),
)
LEAST_OPERATIONS = round(IDLE_EVERY / min(arm.share for arm in ARMS))
"""Of all arms together: each measures its memory once at least."""


def soak_tree(arm: Arm, operations: int, seed: int) -> dict[str, Any]:
    """One arm; raises AssertionError where two accounts disagree."""
    from support.drivers.soak_history import Soak

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        record_to = Path(folder) if arm.recorded else None
        soak = Soak(
            arm.kind,
            arm.write_policy,
            seed=seed,
            uses_g=arm.uses_g,
            record_to=record_to,
        )
        for _ in soak.run(operations, check_every=CHECK_EVERY, idle_every=IDLE_EVERY):
            pass
        events = soak.close()
    points = soak.checkpoints
    steps = [point.operations for point in points]
    growth, error = slope(steps, [point.rss / 1024 for point in points])
    objects, objects_error = slope(
        steps,
        [point.objects["all"] for point in points],
        [point.nodes for point in points],
        [point.ghosts for point in points],
    )
    return {
        "mode": "tree",
        "policy": arm.kind,
        "write_policy": arm.write_policy,
        "uses_g": arm.uses_g,
        "recorded": arm.recorded,
        "operations": operations,
        "seconds": round(time.perf_counter() - start, 1),
        "requests": soak.happened["admit"],
        "kv_tokens_checked": soak.driver.checked_tokens,
        "book_checks": operations // CHECK_EVERY + len(points),
        "sanity_checks": len(points),
        "rss_mib": round(points[-1].rss / 2**20, 1),
        "rss_kib_per_1000_operations": known(growth),
        "rss_standard_error": known(error),
        "objects_per_1000_operations": known(objects),
        "objects_standard_error": known(objects_error),
        "happened": dict(soak.happened),
        "prompts": dict(soak.traffic.drawn),
        "events": events,
    }


def main(
    operations: Annotated[int, typer.Option(min=0, help="tree operations, over all arms")] = 100_000,
    requests: Annotated[int, typer.Option(min=0, help="requests to a real server; 0 starts none")] = 0,
    policy: Annotated[
        str, typer.Option(help="of that server: importance, observe, or default to compare")
    ] = "importance",
    dp_size: Annotated[int, typer.Option(min=1, help="data-parallel ranks of that server")] = 1,
    processes: Annotated[int, typer.Option(min=1, help="arms at once")] = 2,
    max_seconds: Annotated[float, typer.Option(help="of the server's load")] = 600.0,
    seed: Annotated[int, typer.Option(help="decides every operation")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file")] = None,
) -> None:
    rows: list[dict[str, Any]] = []
    if operations and operations < LEAST_OPERATIONS:
        raise typer.BadParameter(f"--operations {operations}: 0, or at least {LEAST_OPERATIONS}")
    if operations:
        # A process each: what one arm gives back must not hide what the next one takes.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=spawn, max_tasks_per_child=1) as pool:
            work = [
                pool.submit(soak_tree, arm, round(operations * arm.share), seed + number)
                for number, arm in enumerate(ARMS)
            ]
            for _ in track(as_completed(work), "tree", total=len(work)):
                pass
        rows += [each.result() for each in work]
    if requests:
        from soak_server import soak_server

        rows.append(soak_server(requests, policy=policy, ranks=dp_size, max_seconds=max_seconds, seed=seed))
    shown = (
        "mode",
        "policy",
        "uses_g",
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
