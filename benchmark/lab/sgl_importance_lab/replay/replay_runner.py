"""Many replays over all cores, or over a Ray cluster: one row per trace, policy, capacity and seed."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from sgl_importance.errors import ImportanceError
from sgl_importance_lab.replay.cache import ReplayCounts, replay_objects, replay_tree
from sgl_importance_lab.replay.policy_registry import IMPORTANCE, OPTIMUM, create_policy, load_policy
from sgl_importance_lab.replay.radix_nodes import mean_node_blocks, replay_nodes
from sgl_importance_lab.replay.ray_cluster import ClusterError, RayCluster, run_on_ray
from sgl_importance_lab.replay.served_nodes import replay_served
from sgl_importance_lab.replay.trace import Trace

InputT = TypeVar("InputT")
JobT = TypeVar("JobT")
RowT = TypeVar("RowT")


class ReplayMode(StrEnum):
    TREE = "tree"
    """Blocks in a prefix tree, whose leaves are evicted."""
    NODES = "nodes"
    """Radix nodes, evicted whole; under ``lru`` and ``importance`` as a server does."""
    OBJECTS = "objects"
    """Independent blocks, as in general cache simulators."""


class ReplayError(ImportanceError, RuntimeError):
    """A replay could not be finished; the message names the cure."""


@dataclass(frozen=True, slots=True)
class Job:
    """One replay.

    Attributes:
        trace: index into the traces of the run.
        seed: of a policy that draws.
        chunk_tokens: that a server prefills at once; said for nodes only, None for no bound.
    """

    trace: int
    policy: str
    capacity: int
    mode: ReplayMode = ReplayMode.TREE
    seed: int = 0
    chunk_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Result of a replay.

    Attributes:
        seed: of the policy's draws, and of the order of sessions where the trace leaves it open.
        requests: that the cache served.
        blocks: block accesses of these.
        hit_blocks: accesses that found their block in the cache.
        block_hit_rate: hit_blocks / blocks.
        token_hit_rate: prompt tokens in hit blocks / prompt tokens.
        full_hit_rate: requests whose every block was in the cache / requests.
        seconds: wall time of the replay, without reading the trace.
        refused_requests: longer than the cache, which a server refuses: nodes only. Rates leave them out.
    """

    trace: str
    policy: str
    capacity_blocks: int
    seed: int
    requests: int
    blocks: int
    hit_blocks: int
    block_hit_rate: float
    token_hit_rate: float
    full_hit_rate: float
    seconds: float
    refused_requests: int = 0


Replay = Callable[[Trace, int], ReplayCounts]


def choose_replay(policy: str, mode: ReplayMode, seed: int = 0, *, chunk_tokens: int | None = None) -> Replay:
    """The compiled form of a policy where it has one, else the policy object in the readable cache.

    Node-granular, ``lru`` and ``importance`` are shadow caches, with answers, as on a server; others see
    prompts alone. The optimum is that of single blocks of prompts there, too.

    Raises:
        UnknownPolicyError: there is no such policy.
    """
    if policy == "lru" and mode is not ReplayMode.NODES:
        from sgl_importance_lab.replay.compiled.fast_lru import replay_lru  # imports numba

        return partial(replay_lru, object_level=mode is ReplayMode.OBJECTS)
    if policy == IMPORTANCE and mode is ReplayMode.TREE:
        return _replay_importance
    if mode is ReplayMode.NODES and policy in ("lru", IMPORTANCE):
        is_importance = policy == IMPORTANCE
        return partial(replay_served, is_importance=is_importance, chunk_tokens=chunk_tokens)
    load_policy(policy)
    if mode is ReplayMode.NODES and policy != OPTIMUM:
        return partial(_replay_nodes, policy, seed, chunk_tokens)
    cache = replay_objects if mode is ReplayMode.OBJECTS else replay_tree
    return lambda trace, capacity: cache(trace, create_policy(policy, capacity, trace, seed=seed))


def _replay_importance(trace: Trace, capacity: int) -> ReplayCounts:
    from sgl_importance_lab.replay.compiled.fast_importance import replay_importance  # these import numba
    from sgl_importance_lab.replay.compiled.fast_turns import replay_turns
    from sgl_importance_lab.replay.trace_turns import ranks_by_turns

    return (replay_turns if ranks_by_turns(trace) else replay_importance)(trace, capacity)


def _replay_nodes(
    policy: str, seed: int, chunk_tokens: int | None, trace: Trace, capacity: int
) -> ReplayCounts:
    chunk_blocks = None if chunk_tokens is None else max(chunk_tokens // trace.block_tokens, 1)
    nodes = max(1, int(capacity / mean_node_blocks(trace, chunk_blocks=chunk_blocks)))
    ranking = create_policy(policy, nodes, trace, seed=seed)
    return replay_nodes(trace, ranking, capacity, chunk_blocks=chunk_blocks)


def run_job(traces: Sequence[Trace], job: Job) -> Row:
    """Runs one job and derives the rates."""
    trace = traces[job.trace]
    replay = choose_replay(job.policy, job.mode, job.seed, chunk_tokens=job.chunk_tokens)
    start = time.perf_counter()
    counts = replay(trace, job.capacity)
    seconds = time.perf_counter() - start
    requests = trace.num_requests - counts.refused_requests
    blocks = trace.num_accesses - counts.refused_blocks
    tokens = int(trace.input_tokens.sum()) - counts.refused_tokens
    return Row(
        trace=trace.name,
        policy=job.policy,
        capacity_blocks=job.capacity,
        seed=job.seed,
        requests=requests,
        blocks=blocks,
        hit_blocks=counts.hit_blocks,
        block_hit_rate=counts.hit_blocks / max(blocks, 1),
        token_hit_rate=counts.hit_tokens / max(tokens, 1),
        full_hit_rate=counts.full_hits / max(requests, 1),
        seconds=seconds,
        refused_requests=counts.refused_requests,
    )


def run_jobs(
    run_one: Callable[[Sequence[InputT], JobT], RowT],
    traces: Sequence[InputT],
    jobs: Sequence[JobT],
    workers: int | RayCluster,
) -> Generator[tuple[int, RowT]]:
    """Runs all jobs; yields (index of the job, row) as they finish.

    Leaving the iterator early, Ctrl-C included, ends the processes that it started.

    Args:
        run_one: a function of a module, so that other processes find it.
        traces: what every job may look at, handed to each process once.
        workers: number of processes, or a Ray cluster.

    Raises:
        ReplayError: a process died, or Ray failed.
    """
    if isinstance(workers, RayCluster):
        try:
            yield from run_on_ray(run_one, traces, jobs, workers)
        except ClusterError as error:
            raise ReplayError(str(error)) from error
        return
    assert workers > 0
    if workers == 1 or len(jobs) <= 1:
        for index, job in enumerate(jobs):
            yield index, run_one(traces, job)
        return
    others = set(multiprocessing.active_children())
    # Started fresh rather than forked: the progress bar's thread may hold a lock at that moment.
    pool = ProcessPoolExecutor(
        min(workers, len(jobs)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(traces,),
    )
    finished = False
    try:
        with blocked_for_children(signal.SIGINT):
            futures = {pool.submit(_work, run_one, job): index for index, job in enumerate(jobs)}
        for future in as_completed(futures):
            yield futures[future], future.result()
        finished = True
    except BrokenProcessPool as error:
        raise ReplayError("a replay process died, perhaps for want of memory: lower --jobs") from error
    finally:
        if not finished:
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
        pool.shutdown(cancel_futures=True)


@contextmanager
def blocked_for_children(number: signal.Signals) -> Iterator[None]:
    """Processes started inside never get the signal; the parent gets it at the end.

    Ctrl-C reaches the whole group of processes, and a worker that is still importing would answer it with a
    traceback; only the parent is to answer.
    """
    resource_tracker.ensure_running()  # its start unblocks the signal
    arrived = False

    def note(*_: object) -> None:
        nonlocal arrived
        arrived = True

    # One that another thread gets, such as a progress bar's, would be answered here in spite of the mask,
    # perhaps between the start of a process and its entry into the list of those to end.
    handler = signal.getsignal(number)
    is_main = threading.current_thread() is threading.main_thread() and handler is not None
    if is_main:
        signal.signal(number, note)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        if is_main:
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if arrived:
            signal.raise_signal(number)


_traces: Sequence[Any] = ()


def _start_worker(traces: Sequence[Any]) -> None:
    global _traces
    _traces = traces


def _work(run_one: Callable[[Sequence[Any], JobT], RowT], job: JobT) -> RowT:
    return run_one(_traces, job)
