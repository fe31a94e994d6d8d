"""The policies that a replay knows, by name. Each is imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any, cast

from sgl_importance.errors import ImportanceError
from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.replay.trace import Trace

__all__ = ["POLICY_NAMES", "UnknownPolicyError", "create_policy", "load_policy"]

OPTIMUM = "belady"
DEFAULT_POLICIES = f"lru,{OPTIMUM}"
IMPORTANCE = "importance"
TRACE_FOLLOWERS = frozenset({OPTIMUM, IMPORTANCE, "continuum", "workload", "turncount"})
"""Policies that look requests or accesses up in the trace, and must see the blocks of a request in order."""

_CLASSES = {
    "random": "sgl_importance_lab.policies.random:RandomPolicy",
    "fifo": "sgl_importance_lab.policies.fifo:FifoPolicy",
    "lru": "sgl_importance_lab.policies.lru:LruPolicy",
    "lfu": "sgl_importance_lab.policies.lfu:LfuPolicy",
    "slru": "sgl_importance_lab.policies.slru:SlruPolicy",
    "tlru": "sgl_importance_lab.policies.tlru:TlruPolicy",
    "mq": "sgl_importance_lab.policies.mq:MqPolicy",
    "s3fifo": "sgl_importance_lab.policies.s3fifo:S3FifoPolicy",
    "sieve": "sgl_importance_lab.policies.sieve:SievePolicy",
    "lru2": "sgl_importance_lab.policies.lru2:Lru2Policy",
    "2q": "sgl_importance_lab.policies.two_q:TwoQPolicy",
    "lirs": "sgl_importance_lab.policies.lirs:LirsPolicy",
    "wtinylfu": "sgl_importance_lab.policies.wtinylfu:WTinyLfuPolicy",
    "cacheus": "sgl_importance_lab.policies.cacheus:CacheusPolicy",
    "lecar": "sgl_importance_lab.policies.lecar:LeCaRPolicy",
    "hyperbolic": "sgl_importance_lab.policies.hyperbolic:HyperbolicPolicy",
    "arc": "sgl_importance_lab.policies.arc:ArcPolicy",
    "gdsf": "sgl_importance_lab.policies.gdsf:GdsfPolicy",
    "lhd": "sgl_importance_lab.policies.lhd:LhdPolicy",
    "continuum": "sgl_importance_lab.policies.continuum:ContinuumPolicy",
    "workload": "sgl_importance_lab.policies.workload_aware:WorkloadAwarePolicy",
    "turncount": "sgl_importance_lab.policies.turn_count:TurnCountPolicy",
    "belady": "sgl_importance_lab.policies.belady:BeladyPolicy",
    "importance": "sgl_importance_lab.replay.importance_replay:ImportanceReplayPolicy",
}

POLICY_NAMES = tuple(_CLASSES)


class UnknownPolicyError(ImportanceError, ValueError):
    """No policy has this name; the message lists those that exist."""


def load_policy(name: str) -> type[EvictionPolicy]:
    """
    Raises:
        UnknownPolicyError: there is no such policy.
    """
    if name not in _CLASSES:
        raise UnknownPolicyError(f"unknown policy {name!r}; known: {', '.join(POLICY_NAMES)}")
    module, class_name = _CLASSES[name].split(":")
    return cast(type[EvictionPolicy], getattr(import_module(module), class_name))


def create_policy(name: str, capacity: int, trace: Trace, *, seed: int = 0) -> EvictionPolicy:
    """A policy in its initial state; only the optimum is given the future of the trace.

    Args:
        name: one of POLICY_NAMES.
        capacity: blocks, or nodes, that the cache can hold.
        trace: the trace that is replayed.
        seed: of a policy that draws; others take none.

    Raises:
        UnknownPolicyError: there is no such policy.
    """
    if name == OPTIMUM:
        from sgl_importance_lab.policies.belady import BeladyPolicy, NextUses

        return BeladyPolicy(capacity, next_uses=NextUses.of(trace.blocks, trace.offsets))
    if name == IMPORTANCE:
        from sgl_importance_lab.replay.importance_replay import ImportanceReplayPolicy
        from sgl_importance_lab.replay.trace_turns import ranks_by_turns
        from sgl_importance_lab.replay.turn_replay import TurnReplayPolicy

        if ranks_by_turns(trace):
            return TurnReplayPolicy(capacity, trace)
        return ImportanceReplayPolicy(capacity, trace)
    policy = load_policy(name)
    known = signature(policy).parameters
    arguments: dict[str, Any] = {"seed": seed} if "seed" in known else {}
    if "requests" in known:
        from sgl_importance_lab.replay.trace_turns import session_requests

        arguments["requests"] = session_requests(trace)
    return policy(capacity, **arguments)
