"""Replaying a recording through the real tree, against a prefix cache written down in ten lines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.observe.trace.records import Fold
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance_lab.offline.study_command import replay_arms
from sgl_importance_lab.offline.tree_replay import (
    LearningEnded,
    TreeReplay,
    fidelity,
    hit_tokens,
    recorded_cost,
    sequence_tokens,
    smallest_capacity,
)
from sgl_importance_lab.study.recording import Recording

from support.workloads.recordings import COST, PAGE_SIZE
from support.workloads.tree_recordings import branches, drawn_requests, make_recording


def endless_cache(recording: Recording) -> list[int]:
    """Cached tokens where nothing is ever evicted."""
    seen: set[int] = set()
    hits = []
    for query in recording.queries:
        pages = query.prompt_pages.tolist()
        found = next((i for i, page in enumerate(pages) if page not in seen), len(pages))
        # The last prompt token is always computed.
        hits.append(min(found * PAGE_SIZE, (query.input_tokens - 1) // PAGE_SIZE * PAGE_SIZE))
        seen.update(query.pages.tolist())
    return hits


@settings(max_examples=30, deadline=None)
@given(branches)
def test_tokens_share_exactly_the_pages_that_were_shared(drawn: list) -> None:
    recording = make_recording(drawn)
    sequences = []
    for order, query in enumerate(recording.queries):
        prompt, output = sequence_tokens(query, order, PAGE_SIZE, len(recording.digests))
        assert (len(prompt), len(output)) == (query.input_tokens, query.output_tokens)
        sequences.append((prompt + output).tolist())
    for a, left in zip(recording.queries, sequences, strict=True):
        for b, right in zip(recording.queries, sequences, strict=True):
            if a is b:
                continue
            common = sum(x == y for x, y in zip(a.pages.tolist(), b.pages.tolist(), strict=False))
            same = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), None)
            assert same is None or same == common * PAGE_SIZE


@settings(max_examples=25, deadline=None)
@given(branches, st.sampled_from(["python-lru", "importance"]))
def test_with_room_for_everything_all_shared_pages_hit(drawn: list, kind: str) -> None:
    recording = make_recording(drawn)
    replay = TreeReplay(recording, capacity_pages=200, kind=kind)
    assert hit_tokens(replay) == endless_cache(recording)
    replay._cache.sanity_check()


@settings(max_examples=25, deadline=None)
@given(branches, st.booleans())
def test_a_small_cache_evicts_and_stays_sound(drawn: list, use_importance: bool) -> None:
    recording = make_recording(drawn)
    policy = ImportancePolicy(CostModel(**COST), use_importance=use_importance)
    capacity = smallest_capacity(recording)
    replay = TreeReplay(recording, capacity_pages=capacity, policy=policy)
    hits = hit_tokens(replay)
    assert all(a <= b for a, b in zip(hits, endless_cache(recording), strict=True))
    replay._cache.sanity_check()
    assert policy.clock == len(recording.queries)


def test_every_arm_runs_where_a_request_fits() -> None:
    recording = make_recording(drawn_requests(0))
    replayed = replay_arms([recording])
    assert replayed
    for one in replayed:
        assert set(one.hits) == {"lru", "ours", "g1", "shuffled"}
        assert one.capacity_pages >= smallest_capacity(recording)
        assert all(len(hits) == len(recording.queries) for hits in one.hits.values())
    smallest = replayed[0]
    assert 0 < sum(smallest.hits["lru"]) < sum(endless_cache(recording))


def test_a_replay_that_went_over_to_lru_has_no_numbers() -> None:
    class Broken(ImportancePolicy):
        def value(self, *arguments, **named):
            raise RuntimeError("a policy that cannot rank")

    recording = make_recording(drawn_requests(0))
    policy = Broken(CostModel(**COST))
    replay = TreeReplay(recording, capacity_pages=smallest_capacity(recording), policy=policy)
    with pytest.raises(LearningEnded, match="a policy that cannot rank"):
        hit_tokens(replay)


def test_folds_reach_the_policy() -> None:
    """Without its folds a recording knows no importance, and g is 1 whatever the setting."""
    recording = make_recording(drawn_requests(1))
    rng = np.random.default_rng(2)
    for query in recording.queries:
        body = rng.random(len(query.prompt_pages)).astype(np.float32) ** 8
        query.folds = [Fold(0, 0, 0, 0.5, first, body, body) for first in (True, False)]

    def factors(query_folds: bool) -> set[float]:
        if not query_folds:
            for query in recording.queries:
                query.folds = []
        seen: set[float] = set()

        class Spy(ImportancePolicy):
            def factor(self, node):
                factor = super().factor(node)
                seen.add(factor)
                return factor

        hit_tokens(TreeReplay(recording, capacity_pages=60, policy=Spy(recorded_cost(recording))))
        return seen

    assert len(factors(True)) > 10
    assert factors(False) == {1.0}


def test_fidelity_counts_requests_that_agree() -> None:
    recording = make_recording(drawn_requests(3), device_tokens=4096)
    for query, hits in zip(recording.queries, endless_cache(recording), strict=True):
        query.cached_tokens = hits
    assert "120 of 120 requests" in fidelity(recording)
    recording.queries[7].cached_tokens += 1
    assert "119 of 120 requests" in fidelity(recording)


def test_a_capacity_below_one_request_is_an_error() -> None:
    recording = make_recording([([0, 1, 0, 1, 1], 0, 4)])
    with pytest.raises(AssertionError, match="smaller than one request"):
        hit_tokens(TreeReplay(recording, capacity_pages=2))
