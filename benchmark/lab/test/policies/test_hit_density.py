"""The statistics of least hit density, against definitions written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance_lab.policies.hit_density import CLASSES, MAX_AGE, HitDensity, _rescale
from sgl_importance_lab.policies.lhd import LhdPolicy

ages = st.integers(0, 12)
events = st.lists(st.tuples(st.integers(0, CLASSES - 1), ages, st.booleans()), max_size=40)


@settings(max_examples=25, deadline=None)
@given(events=events)
def test_density_is_hits_over_time_from_an_age_on(events: list[tuple[int, int, bool]]) -> None:
    model = HitDensity()
    for reuse_class, age, is_hit in events:
        (model.hit if is_hit else model.evict)(reuse_class, age)
    model.reconfigure(resident=10)
    for reuse_class in range(CLASSES):
        for age in range(14):
            rest = [(at, is_hit) for c, at, is_hit in events if c == reuse_class and at >= age]
            time_spent = sum(at - age + 1 for at, _ in rest)
            hits = sum(is_hit for _, is_hit in rest)
            expected = hits / time_spent if rest else 0.0
            assert model.densities[reuse_class][age] == pytest.approx(expected)
    assert all(row[MAX_AGE - 1] == -np.inf for row in model.densities)


def test_recent_events_weigh_more() -> None:
    model = HitDensity()
    model.hit(0, 0)
    model.reconfigure(resident=1)
    model.evict(0, 0)
    model.reconfigure(resident=1)
    assert model.densities[0][0] == pytest.approx(0.9 / 1.9)


def test_classes_halve_the_age() -> None:
    for age in (1, 2, 100, 9_999, 10_000, MAX_AGE - 1, MAX_AGE):
        halvings = HitDensity.class_of_age[age]
        assert halvings == CLASSES - 1 or age * 2**halvings >= MAX_AGE
        assert halvings == 0 or age * 2 ** (halvings - 1) < MAX_AGE
    assert HitDensity.class_of_age[0] == CLASSES - 1


@settings(max_examples=40, deadline=None)
@given(counted=st.lists(st.integers(0, MAX_AGE - 2), max_size=20), delta=st.integers(-9, 9))
def test_a_new_age_unit_keeps_counts_and_moves_them(counted: list[int], delta: int) -> None:
    counts = np.zeros((CLASSES, MAX_AGE))
    for age in counted:
        counts[3, age] += 1
    rescaled = _rescale(counts, delta)
    assert rescaled.sum() == pytest.approx(len(counted))
    assert not rescaled[np.arange(CLASSES) != 3].any()
    for age in set(counted):
        first = int(age / 2.0**delta)
        last = int((age + 1) / 2.0**delta - 1) if delta < 0 else first
        if last < MAX_AGE - 1:
            assert rescaled[3, first : last + 1].sum() > 0
            if delta == 0 or (delta < 0 and counted.count(age) == len(counted)):
                assert rescaled[3, first : last + 1].sum() == pytest.approx(counted.count(age))


def test_the_age_unit_follows_the_size_of_the_cache() -> None:
    model = HitDensity()
    for _ in range(5):
        model.reconfigure(resident=100_000)
    assert model.shift == 10
    model.reconfigure(resident=100_000)
    assert model.shift == 9  # 100,000 blocks, 1 % of 20,000 ages: 500 accesses each, rounded up to 512
    assert model.age(511) == 0
    assert model.age(512) == 1
    assert model.age(10**9) == MAX_AGE - 1


def test_lhd_classes_are_by_the_last_two_hit_ages() -> None:
    policy = LhdPolicy(4)
    policy._model.shift = 0
    policy.insert(0)  # at time 0
    policy.access(0)  # at time 1: ages 1 + 0
    assert policy._class[0] == HitDensity.class_of_age[1]
    for block in range(1, 100):
        policy.insert(block)
    policy.access(0)  # at time 101: ages 100 + 1
    assert policy._class[0] == HitDensity.class_of_age[101]
    policy.access(0)  # ages 1 + 100
    assert policy._class[0] == HitDensity.class_of_age[101]
    policy.access(0)  # ages 1 + 1
    assert policy._class[0] == HitDensity.class_of_age[2]


def test_lhd_learns_during_a_replay() -> None:
    policy = LhdPolicy(2, reconfigure_every=4)
    for block in range(2):
        policy.insert(block)
        policy.evictable(block)
    before = policy._model.densities
    policy.access(0)
    policy.access(0)
    assert policy._model.reconfigurations == 1
    assert policy._model.densities != before
