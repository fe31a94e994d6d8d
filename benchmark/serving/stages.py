"""What is measured, in which order: each stage yields the rows of its pass, one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

from rich.progress import Progress

from benchmark.serving.arms import ARMS
from benchmark.serving.passes import Row, Servers, count, time_first_requests
from benchmark.serving.replayed import replay_workload
from benchmark.serving.timing import time_in_turns, time_open_loop
from benchmark.serving.workloads import Workload

from support.servers import ServerFailed

SEEDS = 10
# Whether a row with these values is there already and stays.
Known = Callable[..., bool]


class Stage(Protocol):
    """Serves workloads with arms, as the settings of its pass say."""

    def __call__(
        self,
        servers: Servers,
        arms: list[str],
        workloads: list[Workload],
        settings: dict[str, Any],
        known: Known,
        progress: Progress,
    ) -> Iterator[Row]: ...


def counts(
    servers: Servers,
    arms: list[str],
    workloads: list[Workload],
    settings: dict[str, Any],
    known: Known,
    progress: Progress,
) -> Iterator[Row]:
    for name in arms:
        for workload in workloads:
            is_copy = ARMS[name].is_copy(workload.tiers) and not settings.get("copies")
            if is_copy or known(workload=workload.name, arm=name):
                continue
            bar = progress.add_task(f"{workload.name}: {name}", total=len(workload.requests))
            start = time.perf_counter()
            try:
                row = count(servers, name, workload, lambda bar=bar: progress.advance(bar))
            except ServerFailed as error:
                progress.print(f"{name} on {workload.name}, left out (--resume): {error}", markup=False)
                continue
            finally:
                progress.remove_task(bar)
            yield {**row, "took": round(time.perf_counter() - start, 1)}


def capacity(
    servers: Servers,
    arms: list[str],
    workloads: list[Workload],
    settings: dict[str, Any],
    known: Known,
    progress: Progress,
) -> Iterator[Row]:
    sizes = settings["device_tokens"]
    bar = progress.add_task("capacity", total=len(arms) * len(workloads) * len(sizes))
    for name in arms:
        for size in sizes:
            for workload in workloads:
                if not known(workload=workload.name, arm=name, device_tokens=size):
                    yield {"device_tokens": size, **count(servers, name, workload, device_tokens=size)}
                progress.advance(bar)


def times(
    servers: Servers,
    arms: list[str],
    workloads: list[Workload],
    settings: dict[str, Any],
    known: Known,
    progress: Progress,
) -> Iterator[Row]:
    alternations, warm_up = settings["alternations"], settings["warm_up"]
    bar = progress.add_task("times", total=alternations * len(arms) * len(workloads))
    for alternation, name in in_turns(arms, alternations):
        fresh = True
        for workload in workloads:
            if not known(workload=workload.name, arm=name, alternation=alternation):
                # What a policy has learnt stays from one workload to the next, as on a server that runs on.
                server, fresh = servers.start(ARMS[name], workload, fresh=fresh), False
                requests = workload.requests[: warm_up + settings["requests"]]
                row = time_open_loop(server, requests, warm_up=warm_up)
                yield {"workload": workload.name, "arm": name, "alternation": alternation, **row}
            progress.advance(bar)


def pairs(
    servers: Servers,
    arms: list[str],
    workloads: list[Workload],
    settings: dict[str, Any],
    known: Known,
    progress: Progress,
) -> Iterator[Row]:
    alternations, warm_up = settings["alternations"], settings["warm_up"]
    bar = progress.add_task("pairs", total=alternations * len(workloads))
    for alternation in range(alternations):
        for workload in workloads:
            if not known(workload=workload.name, alternation=alternation):
                with ExitStack() as stack:
                    order = _rotated(arms, alternation)
                    beside = {name: stack.enter_context(servers.beside()) for name in order}
                    started = {name: own.start(ARMS[name], workload) for name, own in beside.items()}
                    requests = workload.requests[: warm_up + settings["requests"]]
                    rows = time_in_turns(started, requests, warm_up=warm_up)
                for name, row in rows.items():
                    yield {"workload": workload.name, "arm": name, "alternation": alternation, **row}
            progress.advance(bar)


def restart(
    servers: Servers,
    arms: list[str],
    workloads: list[Workload],
    settings: dict[str, Any],
    known: Known,
    progress: Progress,
) -> Iterator[Row]:
    alternations = settings["alternations"]
    bar = progress.add_task("restart", total=alternations * len(arms) * len(workloads))
    for alternation, name in in_turns(arms, alternations):
        for workload in workloads:
            if not known(workload=workload.name, arm=name, alternation=alternation):
                rows = time_first_requests(servers, name, workload)
                yield from ({"alternation": alternation, **row} for row in rows)
            progress.advance(bar)


def in_turns(arms: list[str], alternations: int) -> Iterator[tuple[int, str]]:
    """Each arm once per alternation, another first in each."""
    for alternation in range(alternations):
        yield from ((alternation, name) for name in _rotated(arms, alternation))


def _rotated(arms: list[str], alternation: int) -> list[str]:
    first = alternation % len(arms)
    return [*arms[first:], *arms[:first]]


STAGES: dict[str, Stage] = {
    "counts": counts,
    "capacity": capacity,
    "times": times,
    "pairs": pairs,
    "restart": restart,
}


def without_server(
    kind: str, arms: list[str], workloads: list[Workload], parameters: dict[str, Any], progress: Progress
) -> Iterator[Row]:
    """The replay, or the same tree under many seeds; on workloads of the tiers that they can stand for.

    The replay is of all policies, whatever the arms.
    """
    tiers = ("device",) if kind == "replay" else ("device", "host")
    names = [workload.name for workload in workloads if workload.tiers in tiers]
    for name in progress.track(names, description=kind):
        if kind == "replay":
            yield from replay_workload(name, parameters)
        else:
            from benchmark.serving.in_process import replay_seeds  # brings torch and sglang

            yield from replay_seeds(name, parameters, SEEDS, arms)
