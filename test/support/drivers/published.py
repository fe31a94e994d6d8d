"""The published policies, and ways to drive them that check the protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sgl_importance_lab.policies.arc import ArcPolicy
from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.policies.belady import BeladyPolicy, NextUses
from sgl_importance_lab.policies.cacheus import CacheusPolicy
from sgl_importance_lab.policies.fifo import FifoPolicy
from sgl_importance_lab.policies.gdsf import GdsfPolicy
from sgl_importance_lab.policies.hyperbolic import HyperbolicPolicy
from sgl_importance_lab.policies.lecar import LeCaRPolicy
from sgl_importance_lab.policies.lfu import LfuPolicy
from sgl_importance_lab.policies.lhd import LhdPolicy
from sgl_importance_lab.policies.lirs import LirsPolicy
from sgl_importance_lab.policies.lru import LruPolicy
from sgl_importance_lab.policies.lru2 import Lru2Policy
from sgl_importance_lab.policies.mq import MqPolicy
from sgl_importance_lab.policies.random import RandomPolicy
from sgl_importance_lab.policies.s3fifo import S3FifoPolicy
from sgl_importance_lab.policies.sieve import SievePolicy
from sgl_importance_lab.policies.slru import SlruPolicy
from sgl_importance_lab.policies.tlru import TlruPolicy
from sgl_importance_lab.policies.two_q import TwoQPolicy
from sgl_importance_lab.policies.wtinylfu import WTinyLfuPolicy
from sgl_importance_lab.replay.trace import Trace, TraceBuilder

ONLINE: list[Callable[[int], EvictionPolicy]] = [
    RandomPolicy,
    FifoPolicy,
    LruPolicy,
    LfuPolicy,
    SlruPolicy,
    TlruPolicy,
    MqPolicy,
    S3FifoPolicy,
    SievePolicy,
    Lru2Policy,
    TwoQPolicy,
    LirsPolicy,
    WTinyLfuPolicy,
    LeCaRPolicy,
    CacheusPolicy,
    HyperbolicPolicy,
    ArcPolicy,
    GdsfPolicy,
    LhdPolicy,
]


def belady(trace: Trace) -> Callable[[int], EvictionPolicy]:
    next_uses = NextUses.of(trace.blocks, trace.offsets)
    return lambda capacity: BeladyPolicy(capacity, next_uses=next_uses)


def tree_trace(paths: Sequence[Sequence[int]]) -> Trace:
    """A trace in which equal starts of two paths are the same blocks."""
    builder = TraceBuilder("tree", 1)
    for path in paths:
        blocks = [tuple(path[: depth + 1]) for depth in range(len(path))]
        builder.add(blocks, input_tokens=len(path))
    return builder.build()


def object_trace(accesses: Sequence[object]) -> Trace:
    """A trace of independent objects, one per request."""
    builder = TraceBuilder("objects", 1, prefix_tree=False)
    for block in accesses:
        builder.add([block], input_tokens=1)
    return builder.build()


class Watched(EvictionPolicy):
    """A policy under observation: victims must be evictable, and events must come in their order."""

    name = "watched"

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__(policy.capacity)
        self.policy = policy
        self.resident: set[int] = set()
        self.candidates: set[int] = set()
        self.victims: list[int] = []

    def begin_request(self, request: int) -> None:
        assert len(self.resident) <= self.capacity
        self.policy.begin_request(request)

    def miss(self, block: int) -> None:
        assert block not in self.resident
        self.policy.miss(block)

    def insert(self, block: int) -> None:
        self.resident.add(block)
        self.policy.insert(block)

    def access(self, block: int) -> None:
        assert block in self.resident
        self.policy.access(block)

    def evictable(self, block: int) -> None:
        assert block in self.resident
        self.candidates.add(block)
        self.policy.evictable(block)

    def held(self, block: int) -> None:
        self.candidates.remove(block)
        self.policy.held(block)

    def victim(self) -> int:
        victim = self.policy.victim()
        assert victim in self.candidates, "the victim is held"
        self.candidates.remove(victim)
        self.resident.remove(victim)
        self.victims.append(victim)
        return victim


def object_hits(policy: EvictionPolicy, trace: Trace, *, insert_first: bool = False) -> np.ndarray:
    """Whether each access hits, one object per request; bool [accesses].

    Args:
        policy: fresh policy.
        trace: independent objects.
        insert_first: a new object is a candidate like all others when room is made.
    """
    resident: set[int] = set()
    hits = np.zeros(trace.num_accesses, dtype=bool)
    for index, block in enumerate(trace.blocks.tolist()):
        policy.begin_request(index)
        if block in resident:
            hits[index] = True
            policy.access(block)
            continue
        policy.miss(block)
        if len(resident) == policy.capacity and not insert_first:
            resident.remove(policy.victim())
        resident.add(block)
        policy.insert(block)
        policy.evictable(block)
        if len(resident) > policy.capacity:
            resident.remove(policy.victim())
    return hits
