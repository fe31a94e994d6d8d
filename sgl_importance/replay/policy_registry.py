"""The policies that a replay knows, by name. Each is imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any, cast

from sgl_importance.policy.base import EvictionPolicy
from sgl_importance.replay.trace import Trace

__all__ = ["POLICY_NAMES", "UnknownPolicyError", "create_policy", "load_policy"]

OPTIMUM = "belady"
DEFAULT_POLICIES = f"lru,{OPTIMUM}"
IMPORTANCE = "importance"
TRACE_FOLLOWERS = frozenset({OPTIMUM, IMPORTANCE, "continuum", "workload", "turncount"})
"""Policies that look requests or accesses up in the trace, and must see the blocks of a request in order."""

_CLASSES = {
    "random": "sgl_importance.policy.random:RandomPolicy",
    "fifo": "sgl_importance.policy.fifo:FifoPolicy",
    "lru": "sgl_importance.policy.lru:LruPolicy",
    "lfu": "sgl_importance.policy.lfu:LfuPolicy",
    "slru": "sgl_importance.policy.slru:SlruPolicy",
    "tlru": "sgl_importance.policy.tlru:TlruPolicy",
    "mq": "sgl_importance.policy.mq:MqPolicy",
    "s3fifo": "sgl_importance.policy.s3fifo:S3FifoPolicy",
    "sieve": "sgl_importance.policy.sieve:SievePolicy",
    "lru2": "sgl_importance.policy.lru2:Lru2Policy",
    "2q": "sgl_importance.policy.two_q:TwoQPolicy",
    "lirs": "sgl_importance.policy.lirs:LirsPolicy",
    "wtinylfu": "sgl_importance.policy.wtinylfu:WTinyLfuPolicy",
    "cacheus": "sgl_importance.policy.cacheus:CacheusPolicy",
    "lecar": "sgl_importance.policy.lecar:LeCaRPolicy",
    "hyperbolic": "sgl_importance.policy.hyperbolic:HyperbolicPolicy",
    "arc": "sgl_importance.policy.arc:ArcPolicy",
    "gdsf": "sgl_importance.policy.gdsf:GdsfPolicy",
    "lhd": "sgl_importance.policy.lhd:LhdPolicy",
    "continuum": "sgl_importance.policy.continuum:ContinuumPolicy",
    "workload": "sgl_importance.policy.workload_aware:WorkloadAwarePolicy",
    "turncount": "sgl_importance.policy.turn_count:TurnCountPolicy",
    "belady": "sgl_importance.policy.belady:BeladyPolicy",
    "importance": "sgl_importance.replay.importance_replay:ImportanceReplayPolicy",
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
    return cast(type[EvictionPolicy], getattr(import_module(module), class_name))


def create_policy(
    name: str, capacity: int, trace: Trace, *, whole_nodes: bool = False, seed: int = 0
) -> EvictionPolicy:
    """A policy in its initial state; only the optimum is given the future of the trace.

    Args:
        name: one of POLICY_NAMES.
        capacity: blocks, or nodes, that the cache can hold.
        trace: the trace that is replayed.
        whole_nodes: whether the policy will rank radix nodes instead of blocks.
        seed: of a policy that draws; others take none.

    Raises:
        UnknownPolicyError: there is no such policy.
    """
    if name == OPTIMUM:
        from sgl_importance.policy.belady import BeladyPolicy, NextUses

        return BeladyPolicy(capacity, next_uses=NextUses.of(trace.blocks, trace.offsets))
    if name == IMPORTANCE:
        from sgl_importance.replay.importance_replay import ImportanceReplayPolicy
        from sgl_importance.replay.trace_turns import has_answer_ends
        from sgl_importance.replay.turn_replay import TurnReplayPolicy

        if has_answer_ends(trace):
            return TurnReplayPolicy(capacity, trace, whole_nodes=whole_nodes)
        return ImportanceReplayPolicy(capacity, trace, whole_nodes=whole_nodes)
    policy = load_policy(name)
    known = signature(policy).parameters
    arguments: dict[str, Any] = {"seed": seed} if "seed" in known else {}
    if "requests" in known:
        from sgl_importance.replay.trace_turns import session_requests

        arguments["requests"] = session_requests(trace)
    return policy(capacity, **arguments)
