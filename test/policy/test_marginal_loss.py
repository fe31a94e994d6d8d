"""Marginal loss, g and the reuse estimator: bounds, monotonicity, sanity without data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.nodes.reuse_tracker import ReuseTracker
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import MAX_FACTOR, ImportancePolicy, importance_factor
from sgl_importance.reuse.reuse_class import Transition
from sgl_importance.signal.node_importance import NodeImportance
from sgl_importance.tiers import Tier

PAGE = 16


def _cost() -> CostModel:
    return CostModel(
        prefill_seconds_per_token=1e-4,
        prefill_seconds_per_token_pair=1e-8,
        bytes_per_token=1000,
        host_bytes_per_second=1e9,
        storage_bytes_per_second=1e8,
    )


def _node(policy: ImportancePolicy, tokens: int = PAGE, depth: int = 0) -> NodeMetadata:
    return NodeMetadata(tokens=tokens, depth=depth, page_size=PAGE, clock=policy.clock)


def _seen(mass: float, peak: float, queries: int, uniform: float = 0.1) -> NodeImportance:
    node = NodeImportance(1, creator=0)
    for query in range(1, queries + 1):
        node.observe(
            query, np.array([mass]), np.array([peak]), uniform=uniform, weight=1.0, first=True, decay=0.98
        )
    return node


def test_g_is_one_without_evidence():
    assert importance_factor(NodeImportance(3)) == 1.0
    assert importance_factor(_seen(0.9, 0.9, queries=1)) == 1.0


def test_self_mass_never_moves_g():
    node = NodeImportance(1, creator=5)
    for _ in range(10):
        node.observe(5, np.array([0.9]), np.array([0.9]), uniform=0.1, weight=1.0, first=True, decay=1.0)
    assert importance_factor(node) == 1.0


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.integers(2, 40))
def test_g_is_bounded_and_monotone(mass: float, peak: float, step: float, queries: int):
    factor = importance_factor(_seen(mass, peak, queries))
    assert 1 / MAX_FACTOR <= factor <= MAX_FACTOR
    assert importance_factor(_seen(mass + step, peak, queries)) >= factor - 1e-12
    assert importance_factor(_seen(mass, min(1.0, peak + step), queries)) >= factor - 1e-12


def test_an_untrained_policy_evicts_least_recently_used_first():
    policy = ImportancePolicy(_cost())
    for node_id in range(5):
        policy.admit()
        policy.enter(Tier.DEVICE, node_id, _node(policy), below=None)
    policy.admit()
    assert [policy.victim(Tier.DEVICE) for _ in range(6)] == [0, 1, 2, 3, 4, None]


def test_a_host_copy_makes_a_leaf_the_better_victim():
    policy = ImportancePolicy(_cost())
    policy.admit()
    policy.enter(Tier.DEVICE, 1, _node(policy), below=None)
    policy.enter(Tier.DEVICE, 2, _node(policy), below=Tier.HOST)
    assert policy.victim(Tier.DEVICE) == 2


def test_a_node_that_left_is_no_victim():
    policy = ImportancePolicy(_cost())
    policy.enter(Tier.DEVICE, 1, _node(policy), below=None)
    policy.enter(Tier.DEVICE, 2, _node(policy), below=None)
    policy.leave(Tier.DEVICE, 1)
    assert policy.evictable(Tier.DEVICE) == 1
    policy.leave(Tier.DEVICE, 2)
    assert policy.victim(Tier.DEVICE) is None


def test_deep_tokens_cost_more_to_recompute_but_lose_as_much():
    policy = ImportancePolicy(_cost())
    shallow, deep = _node(policy), _node(policy, depth=100_000)
    assert policy.cost.recompute_seconds(PAGE, deep.depth) > policy.cost.recompute_seconds(
        PAGE, shallow.depth
    )
    assert policy.loss(Tier.DEVICE, deep, below=None) == policy.loss(Tier.DEVICE, shallow, below=None)


def test_importance_moves_the_ranking_only_where_g_is_on():
    important = _seen(0.9, 0.9, queries=8)
    ranked = {}
    for use_importance in (True, False):
        policy = ImportancePolicy(_cost(), use_importance=use_importance)
        policy.admit()
        older, younger = _node(policy), _node(policy)
        older.importance = important
        younger.last_access = policy.admit()
        policy.enter(Tier.DEVICE, 1, older, below=None)
        policy.enter(Tier.DEVICE, 2, younger, below=None)
        ranked[use_importance] = policy.victim(Tier.DEVICE)
    assert ranked == {True: 2, False: 1}


def test_a_slow_storage_never_costs_more_than_computing():
    cost = _cost()
    assert cost.restore_seconds(PAGE, 0, Tier.STORAGE) <= cost.recompute_seconds(PAGE, 0)
    assert cost.restore_seconds(PAGE, 0, Tier.DEVICE) == 0
    with pytest.raises(ValueError, match="bytes_per_token must be positive"):
        CostModel(1.0, 1.0, 0, 1.0, 1.0)


def test_a_session_that_comes_back_outranks_prompts_that_never_do():
    policy = ImportancePolicy(_cost())
    tracker = ReuseTracker(policy.reuse, page_size=PAGE)
    session = _node(policy)
    for turn in range(200):
        policy.admit()
        if turn % 10 == 0:
            tracker.accessed(session, Transition.NEXT_TURN)
        else:
            tracker.created(_node(policy), Transition.COLD)
    once = _node(policy)
    tracker.created(once, Transition.COLD)
    policy.enter(Tier.DEVICE, 1, session, below=None)
    policy.enter(Tier.DEVICE, 2, once, below=None)
    assert session.last_access < once.last_access, "recency speaks for the other"
    assert policy.victim(Tier.DEVICE) == 2


def test_kv_without_a_state_loses_less_than_any_other():
    """Linear attention: nobody can go on from it, however often it was asked for."""
    policy = ImportancePolicy(_cost())
    hot, cold = _node(policy), _node(policy)
    for _ in range(20):
        policy.admit()
        hot.accesses += 1
        hot.last_access = policy.clock
    hot.lacks_state = True
    assert policy.loss(Tier.DEVICE, hot, below=None) < 1e-9 * policy.loss(Tier.DEVICE, cold, below=None)
    hot.pin_octaves = {Tier.DEVICE: 128.0}
    assert policy.loss(Tier.DEVICE, hot, below=None) > policy.loss(Tier.DEVICE, cold, below=None)


def test_a_state_that_requests_go_by_is_worth_less_than_any_other():
    policy = ImportancePolicy(_cost())
    hot, cold = _node(policy), _node(policy)
    for _ in range(20):
        policy.admit()
        hot.accesses += 1
        hot.last_access = policy.clock
    losses = [
        policy.state_loss(hot, below=None, is_passed=True),
        policy.state_loss(cold, below=Tier.HOST, is_passed=False),
        policy.state_loss(cold, below=None, is_passed=False),
        policy.state_loss(hot, below=None, is_passed=False),
    ]
    assert losses == sorted(set(losses))
    assert losses[0] > 0, "recency decides among them"
