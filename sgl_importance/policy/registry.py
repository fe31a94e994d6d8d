"""Eviction policies by name. Each is imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from sgl_importance.policy.base import EvictionPolicy

if TYPE_CHECKING:
    from sgl_importance.replay.trace import Trace

OPTIMUM = "belady"
TRACE_FOLLOWERS = frozenset({"belady", "importance"})
"""Policies that look up each access in the trace, and must see the blocks of a request in order."""

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

IMPORTANCE = "importance"
POLICY_NAMES = (*_CLASSES, IMPORTANCE)


class UnknownPolicyError(ValueError):
    """No policy has this name; the message lists those that exist."""


def load_policy(name: str) -> type[EvictionPolicy]:
    """
    Raises:
        UnknownPolicyError: there is no such policy.
    """
    if name == IMPORTANCE:
        # The adapter of the server's policy knows traces, so it lives with the replay.
        from sgl_importance.replay.importance import ImportanceReplayPolicy

        return ImportanceReplayPolicy
    if name not in _CLASSES:
        raise UnknownPolicyError(f"unknown policy {name!r}; known: {', '.join(POLICY_NAMES)}")
    module, class_name = _CLASSES[name].split(":")
    return cast(type[EvictionPolicy], getattr(import_module(f"sgl_importance.policy.{module}"), class_name))


def create_policy(name: str, capacity: int, trace: Trace, *, whole_nodes: bool = False) -> EvictionPolicy:
    """A policy in its initial state, told what it may know of the trace: only the optimum sees the future.

    Args:
        name: one of POLICY_NAMES.
        capacity: blocks, or nodes, that the cache can hold.
        trace: what is replayed.
        whole_nodes: whether the policy will rank radix nodes instead of blocks.

    Raises:
        UnknownPolicyError: there is no such policy.
    """
    if name == OPTIMUM:
        from sgl_importance.policy.belady import BeladyPolicy, NextUses

        return BeladyPolicy(capacity, next_uses=NextUses.of(trace))
    if name == IMPORTANCE:
        from sgl_importance.replay.importance import ImportanceReplayPolicy

        return ImportanceReplayPolicy(capacity, trace, whole_nodes=whole_nodes)
    return load_policy(name)(capacity)
