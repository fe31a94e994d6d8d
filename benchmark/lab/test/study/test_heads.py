"""Slots of single KV heads and pages fetched ahead, on answers made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sgl_importance_lab.study.cli import app
from sgl_importance_lab.study.heads import prefetchers
from sgl_importance_lab.study.heads.answers import Answer
from sgl_importance_lab.study.heads.choices import (
    LAYER_CHOICE,
    SAME_ATTENTION,
    SINGLE_HEADS,
    WHOLE_PAGES,
    arms_of,
)
from sgl_importance_lab.study.heads.distance_profile import bins_of, fit_profile, own_profile
from sgl_importance_lab.study.heads.prefetch import study_prefetch
from sgl_importance_lab.study.heads.prefetchers import Prefetcher
from sgl_importance_lab.study.heads.slot_run import SlotRun, run_slots
from sgl_importance_lab.study.heads.study_heads import study_heads
from sgl_importance_lab.study.links import BY_COPY, BY_GATHER, FROM_FLASH, LINKS, unit_bytes
from sgl_importance_lab.study.study_report import Finding, StudyError
from sgl_importance_lab.study.thinking.keep_rules import KEEP_RULES, KeepRule, lru, oracle
from sgl_importance_lab.study.thinking.marks import Marks, write_marks
from sgl_importance_lab.study.thinking.rule_run import run_rule
from sgl_importance_lab.study.thinking.wants import Wants

from support.workloads.page_recordings import Asked, looks_back, recorded, write_asked
from support.workloads.recordings import PAGE_SIZE
from support.workloads.wants import random_wants, wants_of

pytest.importorskip("torch")

SHARES = st.sampled_from([0.1, 0.2, 0.5])
KV_HEADS = 2
BY_HEAD = (SINGLE_HEADS, WHOLE_PAGES)
of_layers = random_wants(heads=st.sampled_from([KV_HEADS, 2 * KV_HEADS]), share=0.3)


def run(
    wants: Wants,
    rule: KeepRule,
    share: float,
    *,
    pool_heads: int = 1,
    prefetcher: Prefetcher | None = None,
    buffer_share: float = 0.0,
) -> SlotRun:
    (found,) = run_slots(
        wants, rule, [share], pool_heads=pool_heads, prefetcher=prefetcher, buffer_share=buffer_share
    )
    return found


# ---- slots ----


@given(random_wants(share=0.3), st.sampled_from(sorted(KEEP_RULES)), SHARES)
def test_slots_that_fetch_nothing_ahead_miss_what_rules_miss(wants: Wants, name: str, share: float) -> None:
    (by_head,) = run_rule(wants, KEEP_RULES[name], [share])
    found = run(wants, KEEP_RULES[name], share)
    assert [found.loaded, found.read] == by_head.misses.sum(0).tolist()
    assert (found.fetched, found.unread) == (0, 0)
    assert found.batches <= found.loaded


@given(of_layers, SHARES)
def test_single_heads_never_move_more_than_whole_pages_where_the_future_is_known(
    wants: Wants, share: float
) -> None:
    arms = arms_of(wants, KV_HEADS)
    heads, pages = (
        run(arms[name].wants, oracle, share, pool_heads=arms[name].pool_heads) for name in BY_HEAD
    )
    assert heads.loaded <= KV_HEADS * pages.loaded
    # Nor do heads that share their slots move more than heads with slots of their own.
    assert heads.loaded <= run(wants, oracle, share).loaded


@given(of_layers, st.sampled_from(sorted(KEEP_RULES)), SHARES)
def test_no_rule_loads_less_than_the_oracle_in_shared_slots(wants: Wants, name: str, share: float) -> None:
    best = run(wants, oracle, share, pool_heads=KV_HEADS)
    assert best.loaded <= run(wants, KEEP_RULES[name], share, pool_heads=KV_HEADS).loaded


def test_a_head_gets_the_slots_that_the_other_does_not_need() -> None:
    """One head goes round three pages, the other reads the newest: apart, the first misses all the time."""
    wants = wants_of([[step % 3] for step in range(12)], [10] * 12)
    quiet = wants_of([[9]] * 12, [10] * 12)
    both = Wants(
        "thought/0",
        16,
        0,
        0,
        wants.num_pages,
        np.concatenate([wants.wanted, quiet.wanted], axis=1),
        np.concatenate([wants.mass, quiet.mass], axis=1),
    )
    # 30 % are three pages for each head, one of them the page that is being filled: two are left.
    assert run(both, lru, 0.3).loaded == 12
    assert run(both, lru, 0.3, pool_heads=2).loaded == 3


def test_what_leaves_is_counted_once_and_of_the_answer() -> None:
    wants = wants_of([[4], [1], [4], [1], [4], [1]], [5, 6, 6, 6, 6, 6], prompt_pages=4)
    found = run(wants, lru, 0.3)  # two pages, one of them the page that is being filled
    assert (found.loaded, found.left) == (5, 1)  # page 1 of the prompt and page 4 take a slot in turns


# ---- choices ----


def test_choices_by_hand() -> None:
    mass = np.array([[[0.6, 0.3, 0.1, 0.0], [0.0, 0.4, 0.5, 0.1]]], np.float32)
    wanted = np.zeros(mass.shape, np.bool_)
    wanted[0, 0, 0] = wanted[0, 1, 2] = True
    arms = arms_of(Wants("thought/0", 16, 0, 0, np.array([4]), wanted, mass), 2)
    chosen = {name: np.flatnonzero(arm.wants.wanted[0, 0]).tolist() for name, arm in arms.items()}
    assert chosen == {SINGLE_HEADS: [0], WHOLE_PAGES: [0, 2], LAYER_CHOICE: [0], SAME_ATTENTION: [0, 2]}
    covered = {name: arm.covered.tolist()[0] for name, arm in arms.items()}
    assert covered == pytest.approx(
        {SINGLE_HEADS: 1.1, WHOLE_PAGES: 1.1, LAYER_CHOICE: 0.6, SAME_ATTENTION: 1.2}
    )
    assert {(arm.pool_heads, arm.unit_heads) for arm in arms.values()} == {(2, 1), (1, 2)}


def test_heads_that_want_the_same_pages_gain_nothing() -> None:
    one = wants_of([[step % 4] for step in range(20)], [8] * 20)
    twice = Wants("thought/0", 16, 0, 0, one.num_pages, one.wanted.repeat(2, 1), one.mass.repeat(2, 1))
    arms = arms_of(twice, 2)
    for rule in (lru, oracle):
        heads, pages = (
            run(arms[name].wants, rule, 0.3, pool_heads=arms[name].pool_heads) for name in BY_HEAD
        )
        assert heads.loaded == 2 * pages.loaded > 0
        assert heads.batches == pages.batches


def test_waits_by_hand() -> None:
    assert unit_bytes(16, 2) == 16 * 2 * 128 * 2 * 2
    gather, copies, flash = (LINKS[name] for name in (BY_GATHER, BY_COPY, FROM_FLASH))
    assert gather.seconds(10, 3, 8192) == pytest.approx(3 * 6e-6 + 81920 / 64e9)
    assert copies.seconds(10, 3, 8192) == pytest.approx(20 * 6e-6 + 81920 / 64e9)
    assert flash.seconds(10, 3, 8192) == pytest.approx(3 * 60e-6 + 81920 / 14e9)
    assert flash.seconds(10, 3, 2048) == pytest.approx(3 * 60e-6 + 40960 / 14e9)  # blocks of 4 KiB


# ---- fetching ahead ----

BLIND: dict[str, Prefetcher] = {
    "recency": KEEP_RULES["recency"],
    "next page": prefetchers.next_page,
    "EMA": KEEP_RULES["EMA"],
    "random": prefetchers.any_page,
    "own": own_profile,
    "milestones": prefetchers.behind_milestones(Marks(list(range(0, 400, 37)), [])),
}


@given(of_layers, SHARES, st.sampled_from([0.1, 0.2]))
def test_the_oracle_wastes_nothing_and_leaves_the_least_for_the_next_step(
    wants: Wants, share: float, buffer_share: float
) -> None:
    ahead = {"pool_heads": KV_HEADS, "buffer_share": buffer_share}
    assert run(wants, lru, share, prefetcher=prefetchers.next_reads, **ahead).unread == 0
    # Of two steps, the first is the same for all.
    two = wants.steps(np.arange(2))
    best = run(two, lru, share, prefetcher=prefetchers.next_reads, **ahead)
    for prefetcher in BLIND.values():
        assert best.loaded <= run(two, lru, share, prefetcher=prefetcher, **ahead).loaded


@given(of_layers)
def test_with_room_for_a_step_the_oracle_leaves_nothing_to_wait_for(wants: Wants) -> None:
    found = run(wants, lru, 1.0, pool_heads=KV_HEADS, prefetcher=prefetchers.next_reads, buffer_share=1.0)
    unforeseen = wants.steps(np.array([0])).wanted
    unforeseen[:, :, wants.num_pages[0] - 1] = False
    is_new = wants.wanted[1:] & ~wants.exists()[:-1]
    newest = np.arange(wants.wanted.shape[2]) == wants.num_pages[1:, None] - 1
    # A page that was not there in the step before cannot be brought; the one that is being filled is there.
    assert found.loaded == unforeseen.sum() + (is_new & ~newest[:, None]).sum()


@given(of_layers, SHARES, st.sampled_from([0.05, 0.2]), st.sampled_from(sorted(BLIND)))
def test_bytes_are_never_fewer_than_the_optimum_and_only_their_time_changes(
    wants: Wants, share: float, buffer_share: float, name: str
) -> None:
    found = run(wants, lru, share, pool_heads=KV_HEADS, prefetcher=BLIND[name], buffer_share=buffer_share)
    assert 0 <= found.unread <= found.fetched
    assert found.loaded + found.fetched >= run(wants, oracle, share, pool_heads=KV_HEADS).loaded


def steady(number: int, distance: int, steps: int = 200, page: int = 16, heads: int = 2) -> Wants:
    """Each head reads the token so far behind its own, the second head twice as far."""
    lens = 300 + number * 7 + np.arange(steps)
    num_pages = -(-lens // page)
    wanted = np.zeros((steps, heads, int(num_pages[-1])), np.bool_)
    for head in range(heads):
        wanted[np.arange(steps), head, (lens - 1 - (head + 1) * distance) // page] = True
    return Wants(f"thought/{number}", page, 0, 4, num_pages, wanted, wanted.astype(np.float32))


@given(st.sampled_from(sorted(BLIND)), st.integers(17, 60))
def test_no_prefetcher_but_the_oracle_sees_the_future(name: str, known: int) -> None:
    wants = steady(0, 40, steps=60)
    before = BLIND[name](wants.steps(np.arange(known)))
    for one, other in zip((each.copy() for each in before), BLIND[name](wants), strict=False):
        np.testing.assert_array_equal(one[:, :19], other[:, :19])  # pages that are there at the first step


def test_distances_count_from_a_token_to_the_first_of_a_page() -> None:
    wants = steady(0, 40)  # 300 tokens at the first step: the last is 11 behind the first of its page
    assert bins_of(wants, 0)[-3:].tolist() == [(11 + 32) // 4, (11 + 16) // 4, 11 // 4]
    assert bins_of(wants, 5)[-2:].tolist() == [16 // 4, 0]
    assert bins_of(wants, 4, ahead=1)[-1] == 16 // 4
    assert len(bins_of(wants, 4)) == 19


def test_a_page_is_there_when_it_comes_into_a_heads_reach() -> None:
    """Heads that look back by a fixed distance: the profile of other answers names each page in time."""
    wants = steady(1, 70)
    profile = fit_profile([steady(number, 70) for number in range(2, 6)])
    ahead = {"pool_heads": 2, "buffer_share": 0.04}
    none = run(wants, lru, 0.1, pool_heads=2)
    learnt = run(wants, lru, 0.1, prefetcher=profile, **ahead)
    chance = run(wants, lru, 0.1, prefetcher=prefetchers.any_page, **ahead)
    assert none.loaded > 20
    assert learnt.loaded < none.loaded / 4
    assert chance.loaded >= none.loaded - 2
    # Learnt from heads that look elsewhere, it names nothing of use.
    other = run(wants, lru, 0.1, prefetcher=fit_profile([steady(2, 33)]), **ahead)
    assert other.loaded > 2 * learnt.loaded


def crowded(number: int, distance: int) -> Wants:
    """The same, and each head reads two pages of the prompt with more attention all the time."""
    wants = steady(number, distance)
    wants.mass[:] *= 0.1
    for page in (0, 3):
        wants.wanted[:, :, page], wants.mass[:, :, page] = True, 1.0
    return wants


@pytest.mark.parametrize(("distances", "verdict"), [((70, 70), "supported"), ((70, 33), "not supported")])
def test_a_profile_is_judged_by_answers_that_it_was_not_learnt_from(
    distances: tuple[int, int], verdict: str
) -> None:
    """Where every second answer reads elsewhere, what is learnt from the others is of no use."""
    answers = [Answer(crowded(number, distances[number % 2]), 2, None) for number in range(6)]
    found = study_prefetch({(16, "thought"): answers}, None)
    assert found.verdict.startswith(verdict), found.verdict


def test_the_page_behind_each_that_was_read_is_next() -> None:
    (scores,) = prefetchers.next_page(wants_of([[1, 4]], [8]))
    assert np.flatnonzero(scores[0] > -np.inf).tolist() == [2, 5]


def test_a_milestone_brings_what_stands_behind_it() -> None:
    wants = wants_of([[1], [3]], [8, 8])
    (first, second) = prefetchers.behind_milestones(Marks([18, 55, 60, 100], []))(wants)
    assert np.flatnonzero(first[0] > -np.inf).tolist() == [2, 3]  # page 1 holds 18, and page 3 the next
    assert np.flatnonzero(second[0] > -np.inf).tolist() == [4, 5, 6]


# ---- the study ----


def apart(number: int, kind: str, *, together: bool) -> Asked:
    """Heads of a layer that want pages in turns: the same ones, or one head those that the other does not."""
    steps, prompt_pages = 48, 20
    mass = np.full((steps, 2, 2, prompt_pages + steps // PAGE_SIZE + 2), 1e-6)
    for at in range(steps):
        for head in range(2):
            turn = (at + number) % 5
            first = 3 * turn if together or not head else 3 * (turn + 2) % 15
            mass[at, :, head, first : first + 3] = 0.3
    return Asked(number, prompt_pages, mass, kind=kind)


def finding(found: list[Finding], study: str) -> Finding:
    (one,) = (each for each in found if each.study == study)
    return one


@pytest.mark.parametrize("together", [True, False])
def test_heads_that_want_pages_of_their_own_are_told_from_those_that_do_not(
    tmp_path: Path, together: bool
) -> None:
    kinds = ("decode", "thought")
    recording = recorded(tmp_path, [apart(at, kinds[at % 2], together=together) for at in range(10)])
    units = finding(study_heads([recording], {}), "heads-residency")
    rows = {
        (row["kind"], row["units"]): row for row in units.rows if (row["rule"], row["kept"]) == ("EMA", 0.2)
    }
    assert set(rows) == {
        (kind, units) for kind in kinds for units in (*BY_HEAD, LAYER_CHOICE, SAME_ATTENTION)
    }
    assert units.verdict.startswith("not supported" if together else "supported")
    assert (units.value.value == pytest.approx(0, abs=0.01)) == together
    single, whole = (rows["thought", name] for name in BY_HEAD)
    assert single["covered"] == pytest.approx(whole["covered"])
    assert single["moved KiB"] <= whole["moved KiB"]
    assert units.notes[0].startswith("2 KV heads a layer")


def test_fetching_is_learnt_from_other_answers(tmp_path: Path) -> None:
    recording = recorded(tmp_path, [looks_back("thought", number, 5, steps=120) for number in range(10)])
    marks = {f"thought/{number}/{number}": Marks([3, 30, 60], []) for number in range(10)}
    found = finding(study_heads([recording], marks), "heads-prefetch")
    rows = {
        row["prefetcher"]: row
        for row in found.rows
        if (row["kept"], row["buffer"]) in ((0.2, 0.05), (0.2, 0.0))
    }
    assert rows["none"]["wait saved, gather"] == 0
    for row in rows.values():
        assert 0 < row["swap-ins a token"] <= row["loads a token"]
    assert rows["oracle"]["unread"] == 0
    blind = [row["loaded of read"] for name, row in rows.items() if name not in ("oracle", "none")]
    assert rows["oracle"]["loaded of read"] <= min(blind)
    assert {"milestone", "recency"} <= set(rows)
    assert "thought: it saves" in found.verdict


def test_recordings_that_say_nothing_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    alone = recorded(tmp_path / "1", [Asked(0, 12, rng.random((48, 1, 1, 26)), kind="thought")])
    with pytest.raises(StudyError, match="one KV head"):
        study_heads([alone], {})
    once = recorded(tmp_path / "2", [looks_back("thought", 0, 2)])
    with pytest.raises(StudyError, match="record two or more"):
        study_heads([once], {})
    brief = recorded(tmp_path / "3", [looks_back("thought", 0, 2, steps=8)])
    with pytest.raises(StudyError, match="no answers of 32 tokens or more"):
        study_heads([brief], {})
    short = recorded(tmp_path / "4", [looks_back("thought", 0, 2)], share=0.1)
    with pytest.raises(StudyError, match=r"record with --kv-importance-trace-pages 0\.4 or more"):
        study_heads([short], {})


def test_the_command_writes_its_findings(tmp_path: Path) -> None:
    write_asked(tmp_path / "lists", [looks_back("thought", number, 3) for number in range(4)])
    write_marks(tmp_path / "marks.jsonl", {"thought/0/0": Marks([3, 30], [])})
    arguments = ["heads", str(tmp_path / "lists"), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--marks", str(tmp_path / "marks.jsonl")])
    assert result.exit_code == 0, result.output
    for name in ("residency", "prefetch"):
        assert json.loads((tmp_path / f"heads-{name}.json").read_text())["rows"]
        assert (tmp_path / f"heads-{name}.png").stat().st_size > 1000
