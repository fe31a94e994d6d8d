"""Eviction policies by name. Each is imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

import numpy as np

from sgl_importance.policy.base import EvictionPolicy

if TYPE_CHECKING:
    from sgl_importance.replay.trace import IntArray, Trace

OPTIMUM = "belady"

_CLASSES = {
    "random": "random:RandomPolicy",
    "fifo": "fifo:FifoPolicy",
    "lru": "lru:LruPolicy",
    "lfu": "lfu:LfuPolicy",
    "slru": "slru:SlruPolicy",
    "tlru": "tlru:TlruPolicy",
    "mq": "mq:MqPolicy",
    "s3fifo": "s3fifo:S3FifoPolicy",
    "arc": "arc:ArcPolicy",
    "gdsf": "gdsf:GdsfPolicy",
    "lhd": "lhd:LhdPolicy",
    "belady": "belady:BeladyPolicy",
}

POLICY_NAMES = tuple(_CLASSES)


class UnknownPolicyError(ValueError):
    """No policy has this name; the message lists those that exist."""


def load_policy(name: str) -> type[EvictionPolicy]:
    """
    Raises:
        UnknownPolicyError: there is no such policy.
    """
    if name not in _CLASSES:
        raise UnknownPolicyError(f"unknown policy {name!r}; known: {', '.join(POLICY_NAMES)}")
    module, class_name = _CLASSES[name].split(":")
    return cast(type[EvictionPolicy], getattr(import_module(f"sgl_importance.policy.{module}"), class_name))


def create_policy(name: str, capacity: int, trace: Trace) -> EvictionPolicy:
    """A policy in its initial state, told what it may know of the trace: only the optimum sees the future.

    Raises:
        UnknownPolicyError: there is no such policy.
    """
    policy = load_policy(name)
    if name == OPTIMUM:
        return policy(capacity, next_uses(trace))  # type: ignore[call-arg]
    return policy(capacity)


def next_uses(trace: Trace) -> IntArray:
    """Where in ``trace.blocks`` each access's block is used next; the number of accesses where never.

    Returns:
        int64 [accesses].
    """
    accesses = trace.num_accesses
    order = np.argsort(trace.blocks, kind="stable")  # accesses of one block lie together, in time
    following = np.full(accesses, accesses, dtype=np.int64)
    same = trace.blocks[order][1:] == trace.blocks[order][:-1]
    following[order[:-1][same]] = order[1:][same]
    return following
