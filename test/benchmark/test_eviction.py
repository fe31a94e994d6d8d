"""KV that is let go or quantised while an answer is written: the embedded model, and scores by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmark.eviction.answers import THOUGHT, Asked, Kind
from benchmark.eviction.decoder import Reaction, RowKeys
from benchmark.eviction.demotion import MILESTONES, RANDOM, UNIFORM, share_of_bytes, spared
from benchmark.eviction.retention import (
    RKV,
    ByPlan,
    ByRule,
    Demoting,
    Evicting,
    live_wants,
    most_to_come,
    note_step,
    quantised,
    redundancy,
)
from benchmark.eviction.wrong_evictions import RIGHT, WRONG, taken
from sgl_importance_lab.reasoner.milestones import milestones
from sgl_importance_lab.study.thinking.keep_rules import KEEP_RULES
from sgl_importance_lab.study.thinking.wants import Wants

from support.workloads.wants import random_wants, wants_of


@pytest.fixture(scope="module")
def kind() -> Kind:
    torch.set_num_threads(1)
    return Kind(THOUGHT)


@pytest.fixture(scope="module")
def asked(kind: Kind) -> list[Asked]:
    return kind.asked(96, range(3))


def live(kind: Kind, asked: Asked, page: int) -> Wants:
    return live_wants(asked.rid, len(asked.prompt), len(asked.right), page, kind.heads)


@dataclass
class Spy:
    """Tells another of each step, and keeps what heads see behind it."""

    inner: Evicting
    seen: list[Any] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)

    def __call__(self, step: int, row: RowKeys) -> None:
        self.inner(step, row)
        self.seen.append(row.seen.reshape(-1, row.seen.shape[-1]).numpy().copy())
        self.keys.append(row.keys.clone())


def test_answers_are_right_where_nothing_is_let_go(kind: Kind, asked: list[Asked]) -> None:
    """Prompts of three lengths in one batch: each is answered as alone."""
    nothing: list[Reaction | None] = [None] * 3
    assert kind.answers(asked, nothing) == [list(each.right) for each in asked]
    roomy: list[Reaction | None] = [
        Evicting(ByRule(KEEP_RULES["EMA"]), live(kind, each, 16), budget=100) for each in asked
    ]
    assert kind.answers(asked, roomy) == [list(each.right) for each in asked]


@pytest.mark.parametrize("page", [1, 16])
def test_heads_see_what_fits_and_an_answer_ends_at_its_first_wrong_token(
    kind: Kind, asked: list[Asked], page: int
) -> None:
    budget = 48 // page
    spies = [Spy(Evicting(ByRule(KEEP_RULES["recency"]), live(kind, each, page), budget)) for each in asked]
    found = kind.answers(asked, list(spies))
    for each, spy, written in zip(asked, spies, found, strict=True):
        for step, seen in enumerate(spy.seen):
            tokens = len(each.prompt) + step
            first = max(0, (-(-tokens // page) - budget) * page)
            assert (seen[:, first:]).all()
            assert not seen[:, :first].any()
        assert written[-1] != each.right[len(written) - 1]
        assert each.right_before(written) == (len(written) - 1) / len(each.right) < 1


def test_what_is_let_go_stays_away(kind: Kind, asked: list[Asked]) -> None:
    spy = Spy(Evicting(ByRule(KEEP_RULES["LRU"]), live(kind, asked[0], 1), 90))
    kind.answers(asked[:1], [spy])
    for before, after in zip(spy.seen, spy.seen[1:], strict=False):
        assert not (after[:, : before.shape[1]] & ~before).any()
    assert spy.inner.evicted == (~spy.seen[-1]).sum() > 0


def test_r_kv_keeps_a_budget(kind: Kind, asked: list[Asked]) -> None:
    spy = Spy(Evicting(RKV(every=8), live(kind, asked[0], 1), 60))
    kind.answers(asked[:1], [spy])
    for seen in spy.seen:
        assert (seen.sum(1) == min(60, seen.shape[1])).all()
        assert seen[:, -8:].all()


def test_a_plan_goes_on_with_its_last_scores() -> None:
    plan = ByPlan(iter([np.array([[1.0, 2.0]])]))
    noted = live_wants("thought/0", 3, 2, 1, 1)
    nothing = torch.zeros(1, 1, 3)
    row = RowKeys(nothing, nothing, nothing, nothing, nothing)
    for step in range(2):
        assert plan.scores(step, row, noted).tolist() == [[1.0, 2.0, -np.inf, -np.inf]]


def test_most_to_come_by_hand() -> None:
    wants = wants_of([[0], [1], [0, 2]], [3, 3, 3])
    assert [scores.tolist() for scores in most_to_come(wants)] == [
        [[0.25, 0.25, 0.25]],
        [[0.25, 0, 0.25]],
        [[0, 0, 0]],
    ]


def test_a_step_is_noted_by_page() -> None:
    noted = live_wants("thought/0", 3, 2, 2, 2)
    assert noted.num_pages.tolist() == [2, 2]
    note_step(noted, 1, torch.tensor([[[0.1, 0.2, 0.3, 0.4]], [[0.7, 0.1, 0.1, 0.1]]]))
    np.testing.assert_allclose(noted.mass[1], [[0.3, 0.7], [0.8, 0.2]], rtol=1e-6)
    assert noted.wanted[1].tolist() == [[False, True], [True, False]]


@given(random_wants())
def test_right_and_wrong_evictions_are_told_apart(wants: Wants) -> None:
    step = wants.num_steps // 2
    soon = wants.wanted[step + 1 : step + 6].any(0)
    for which, are_soon in ((WRONG, True), (RIGHT, False)):
        pages = taken(wants, step, 2, which)
        assert (soon[pages] == are_soon).all()
        assert pages.sum(1).max() <= 2
        assert not pages[:, wants.num_pages[step] - 1 :].any()


# ---- fewer bits ----


@given(st.integers(2, 8), st.integers(0, 2**16))
def test_numbers_come_back_within_half_a_step(bits: int, seed: int) -> None:
    numbers = torch.from_numpy(np.random.default_rng(seed).normal(size=(5, 32)).astype(np.float32))
    found = quantised(numbers, bits)
    step = numbers.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((found - numbers).abs() <= 0.51 * step + 1e-3 * numbers.abs().amax()).all()
    for row in found:
        assert len(row.unique()) <= 2**bits - 1


def test_what_falls_behind_is_quantised_once_and_milestones_are_not(kind: Kind, asked: list[Asked]) -> None:
    each = asked[0]
    whole = spared(each, MILESTONES)
    demoting = Demoting(ByRule(KEEP_RULES["recency"]), live(kind, each, 1), 40, bits=2, spared=whole)
    spy = Spy(demoting)
    kind.answers([each], [spy])
    assert all(seen.all() for seen in spy.seen), "a key was hidden"
    first, last = spy.keys[0], spy.keys[-1]
    behind = first.shape[2] - 40
    for token in range(behind):
        assert torch.equal(first[:, :, token], last[:, :, token])
        assert len(first[0, 0, token].unique()) <= 3 or whole[token]
    assert demoting.demoted == kind.heads * int((~whole[: last.shape[2] - 40]).sum())
    dim = last.shape[3]
    written = len(each.prompt) + len(each.right)
    saved = demoting.demoted * (dim * 14 - 16) / (written * kind.heads * dim * 16)
    assert share_of_bytes(each, demoting, dim) == pytest.approx(1 - saved)


def test_arms_spare_as_many_tokens(asked: list[Asked]) -> None:
    each = asked[0]
    assert each.task is not None
    thought = each.task.solution.thought
    stated = milestones(thought)
    chosen = spared(each, MILESTONES)
    assert np.flatnonzero(chosen).tolist() == [len(each.prompt) + 1 + at for at in stated]
    drawn = spared(each, RANDOM)
    assert drawn.sum() == min(len(stated), len(each.right) - 1 - len(stated))
    assert not (drawn & chosen).any()
    assert not spared(each, UNIFORM).any()


# ---- R-KV ----


@given(st.integers(2, 9), st.integers(0, 2**16))
def test_redundancy_is_that_of_a_loop(tokens: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(2, tokens, 3)).astype(np.float32)
    keys[:, 1] = keys[:, 0]
    seen = rng.random((2, tokens)) < 0.8
    seen[:, :2] = True
    found = redundancy(torch.from_numpy(keys), torch.from_numpy(seen), 0.5).numpy()
    for head in range(2):
        unit = keys[head] / np.linalg.norm(keys[head], axis=1, keepdims=True)
        cosine = unit @ unit.T
        total = np.zeros(tokens)
        for one in np.flatnonzero(seen[head]):
            others = [other for other in np.flatnonzero(seen[head]) if other != one]
            alike = [other for other in others if cosine[one, other] > 0.5]
            for other in others:
                if not alike or other != alike[-1]:
                    total[other] += cosine[one, other]
        score = np.where(seen[head], np.exp(total / seen[head].sum()), 0)
        np.testing.assert_allclose(found[head], score / score.sum(), rtol=1e-3, atol=1e-6)
