"""Replays on a Ray cluster: the same cells as in a process pool, as Ray tasks.

Each worker process gets a copy of the traces once, as a worker of the process pool does, and runs the same
code on them, so the rows are the same. Ray runs a cell again whose node was lost.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from typing import Any

from sgl_importance.errors import ImportanceError
from sgl_importance_lab.replay.source_digest import source_digest

CONNECT_SECONDS = 10.0
MOST_TASKS = 1000
"""That are with Ray at a time: it looks through all of them for the next that is done."""


class ClusterError(ImportanceError, RuntimeError):
    """Ray is missing, cannot be reached, or lost a cell; the message names the cure."""


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Where to replay.

    Attributes:
        address: of the cluster's head, such as 10.0.0.1:6379. None takes the cluster that RAY_ADDRESS names,
            or else starts one on this machine for the time of the sweep.
    """

    address: str | None = None


def run_on_ray(
    run_one: Callable[[Sequence[Any], Any], Any],
    traces: Sequence[Any],
    jobs: Sequence[Any],
    cluster: RayCluster,
) -> Generator[tuple[int, Any]]:
    """Runs all jobs, each as a task of one core; yields (index of the job, row) as they finish.

    Leaving the iterator early cancels what is left.

    Args:
        run_one: a function of a module that is installed on every node.

    Raises:
        ClusterError: there is no Ray, no cluster, no such code on it, or a cell was lost twice.
    """
    ray = _connected(cluster)
    waiting = iter(enumerate(jobs))
    running: dict[Any, int] = {}
    try:
        held = ray.put(pickle.dumps(traces))
        # Tried once more where its worker died: the node may have gone, or another cell used up its memory.
        task = ray.remote(num_cpus=1, max_retries=1)(_work)
        while True:
            for index, job in islice(waiting, MOST_TASKS - len(running)):
                # In a list, for Ray would hand over what a plain reference stands for, with every cell anew.
                running[task.remote([held], source_digest(), run_one, job)] = index
            if not running:
                return
            finished, _ = ray.wait(list(running))
            for reference in finished:
                yield running.pop(reference), ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ClusterError):
            raise error.cause from None
        if isinstance(error.cause, ModuleNotFoundError):
            raise ClusterError(
                f"a Ray worker: {error.cause}: install sgl-importance on every node"
            ) from error
        raise error.cause from error
    except ray.exceptions.RayError as error:
        last_line = str(error).strip().splitlines()[-1]
        raise ClusterError(
            f"Ray lost a replay ({last_line}): give its nodes more memory or fewer cores"
        ) from error
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        ray.shutdown()


def _connected(cluster: RayCluster) -> Any:
    """The module of Ray, connected."""
    # Ray would otherwise tell its makers of a cluster that it starts.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise ClusterError("--jobs ray needs Ray: pip install './benchmark/lab[ray]'") from error
    named = cluster.address or os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if named is None:
        ray.init(address="local", include_dashboard=False, **quiet)
        return ray
    unreachable = ClusterError(f"no Ray cluster answers at {named}: correct the address, or start one there")
    if not _answers(named):
        raise unreachable
    try:
        ray.init(address=named, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise unreachable from error
    return ray


def _answers(address: str) -> bool:
    """Whether something listens there. Ray itself tries for minutes, and cannot be interrupted."""
    host, colon, port = address.rpartition(":")
    if not colon or "://" in address or not port.isdigit():
        return True  # a name of Ray's own, such as auto
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError):
        return False
    return True


_held: tuple[str, Sequence[Any]] = ("", ())
"""In a worker: the traces of the sweep that it works for, and the name under which Ray holds them."""


def _work(held: list[Any], source: str, run_one: Callable[[Sequence[Any], Any], Any], job: Any) -> Any:
    global _held
    if source != source_digest():
        raise ClusterError("a Ray worker has another sgl-importance: install the same release on every node")
    (reference,) = held
    if _held[0] != reference.hex():
        ray: Any = import_module("ray")
        _held = ("", ())  # one sweep's traces at a time
        _held = (reference.hex(), pickle.loads(ray.get(reference)))
    return run_one(_held[1], job)
