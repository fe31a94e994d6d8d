"""What long thoughts want, on lists made by hand: measures, rules that keep pages, marks and verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sgl_importance_lab.replay.residency.page_steps import PageRecording
from sgl_importance_lab.study.cli import app
from sgl_importance_lab.study.links import BY_GATHER, FROM_FLASH, LINKS, unit_bytes
from sgl_importance_lab.study.study_report import Finding, StudyError, verdict_of_parts
from sgl_importance_lab.study.thinking import measures
from sgl_importance_lab.study.thinking.keep_rules import KEEP_RULES, KeepRule, oracle, recency, stability
from sgl_importance_lab.study.thinking.marks import Marks, Stretch, read_marks, write_marks
from sgl_importance_lab.study.thinking.measured import Kinds
from sgl_importance_lab.study.thinking.request_measures import measure_request, unstable_heads
from sgl_importance_lab.study.thinking.rule_run import run_rule
from sgl_importance_lab.study.thinking.study_thinking import study_thinking
from sgl_importance_lab.study.thinking.tier_stalls import stall
from sgl_importance_lab.study.thinking.wants import Bools, Wants, read_wants

from support.workloads import page_recordings
from support.workloads.page_recordings import Asked, looks_back, recorded
from support.workloads.recordings import PAGE_SIZE
from support.workloads.wants import random_wants, wants_of

pytest.importorskip("torch")

KINDS = Kinds("thought", "decode")


def keep(wants: Wants, rule: KeepRule, share: float) -> Bools:
    (run,) = run_rule(wants, rule, [share])
    return run.kept


# ---- measures ----


def test_recall_counts_pages_that_are_there() -> None:
    wants = wants_of([[0], [1], [2], [0, 3]], [3, 3, 3, 4])
    kept = keep(wants, recency, 0.3)  # one page of three: the newest; two of four
    assert kept[:, 0].tolist() == [[0, 0, 1, 0]] * 3 + [[0, 0, 1, 1]]
    # Steps on to 2: wants 2, kept. Steps on to 3: wants 0 and 3, of which 3 was not there yet.
    assert measures.recall(wants, kept, 2).tolist() == [[1, 2]]
    assert measures.recall(wants, kept, 2, np.array([2])).tolist() == [[1, 1]]
    assert measures.mass_recall(wants, kept, 2).tolist() == [[0.25, 0.5]]


def test_moves_by_hand() -> None:
    wants = wants_of([[0, 1], [1, 2], [1, 2], [0, 1]], [10] * 4)
    assert measures.adjacent_jaccard(wants).tolist() == [[1 / 3 + 1 + 1 / 3, 3]]
    # Of 2 wanted pages out of 10, chance shares a fifth: (0.5 - 0.2) / 0.8 twice, then 1.
    assert measures.rank_consistency(wants)[0] == pytest.approx([0.375 + 0.375 + 1, 3])
    assert measures.reuse_distances(wants).tolist() == [4, 1, 0, 0, 0, 0, 0, 3]
    assert measures.recurrence(wants, 1e-4).tolist() == [[1, 3]]


def test_rankings_promote_what_the_one_before_did_not_want() -> None:
    wants = wants_of([[0, 1]] * 16 + [[1, 2]] * 16, [4] * 32)
    assert measures.promoted(wants).tolist() == [[1, 2]]


def test_an_eviction_is_false_where_the_page_is_wanted_within_five_steps() -> None:
    rows = [[0]] * 3 + [[3]] * 6 + [[0]]
    wants = wants_of(rows, [4, 4, 5, 5, 5, 5, 5, 5, 5, 5])
    kept = np.zeros_like(wants.wanted)
    kept[:, 0, 0] = [
        1,
        1,
        1,
        0,
        1,
        0,
        0,
        0,
        0,
        0,
    ]  # left at step 3, six before it is wanted; at 5, four before
    assert measures.false_evictions(wants, kept).tolist() == [[1, 2]]


def test_late_wants_leave_out_the_newest_pages() -> None:
    wants = wants_of([[0, 6], [1, 7], [1]], [8, 8, 9])
    of_one = np.arange(9) == 1
    assert measures.late_wants(wants, of_one, 64).tolist() == [[2, 3]]
    assert measures.late_wants(wants, ~of_one, 64).tolist() == [[1, 3 + 3 + 4]]
    assert measures.late_wants(wants, of_one, 64, np.array([True, False, True])).tolist() == [[1, 2]]


def test_the_least_consistent_quarter_of_the_heads_is_unstable() -> None:
    stable, restless = np.zeros((32, 1, 40), np.bool_), np.zeros((32, 1, 40), np.bool_)
    stable[:, 0, 3] = True
    restless[np.arange(32), 0, np.arange(32)] = True
    wanted = np.concatenate([stable, stable, restless, stable], axis=1)
    wants = Wants("thought/0", 1, 0, 0, np.full(32, 40), wanted, wanted / np.float32(1))
    assert unstable_heads([measure_request(wants, None, 0, (0.2,))]).tolist() == [False, False, True, False]


@given(random_wants(), st.data())
def test_phases_share_out_what_is_counted(wants: Wants, data: st.DataObject) -> None:
    bits = data.draw(st.lists(st.booleans(), min_size=wants.num_steps, max_size=wants.num_steps))
    one = np.array(bits)
    kept = keep(wants, KEEP_RULES["EMA"], 0.3)
    for measure in (
        measures.adjacent_jaccard,
        measures.rank_consistency,
        measures.promoted,
        measures.reuse_distances,
        lambda seen, of=None: measures.false_evictions(seen, kept, of),
    ):
        np.testing.assert_allclose(measure(wants, one) + measure(wants, ~one), measure(wants), atol=1e-9)
    everywhere = measures.recurrence(wants, 1e-4)
    assert (measures.recurrence(wants, 1e-4, one) <= everywhere).all()


def test_waits_are_those_of_the_tier_that_has_the_page() -> None:
    """Two layers of two heads. HBM has room for one page beside the one that is filled, DRAM for all."""
    wanted = np.zeros((3, 4, 5), np.bool_)
    wanted[0, 0, [0, 1]] = True  # from flash, at once
    wanted[1, 3, 2] = True  # of the other layer, from flash
    wanted[2, 0, 0] = True  # pushed out of HBM by the newer page
    wants = Wants("thought/0", 16, 0, 0, np.full(3, 5), wanted, wanted / np.float32(1), layer_heads=2)
    in_hbm, in_dram = run_rule(wants, KEEP_RULES["recency"], [0.4, 1.0])
    assert in_hbm.loads.tolist() == [[2, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0]]
    assert in_dram.loads.tolist() == [[2, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    unit = unit_bytes(16, 1)
    seconds = LINKS[FROM_FLASH].seconds(3, 2, unit) + LINKS[BY_GATHER].seconds(1, 1, unit)
    assert stall(wants, in_hbm, in_dram).tolist() == [[pytest.approx(1e6 * seconds), 3]]


# ---- rules ----


@given(random_wants(), st.sampled_from(sorted(KEEP_RULES)), st.sampled_from([0.1, 0.2, 0.5]))
def test_a_rule_keeps_what_fits_and_the_page_being_filled(wants: Wants, rule: str, share: float) -> None:
    kept = keep(wants, KEEP_RULES[rule], share)
    assert (kept.sum(2) == np.ceil(share * wants.num_pages)[:, None]).all()
    assert not (kept & ~wants.exists()).any()
    assert kept[np.arange(wants.num_steps), :, wants.num_pages - 1].all()


@given(random_wants(), st.sampled_from(sorted(set(KEEP_RULES) - {"oracle"})), st.data())
def test_no_rule_but_the_oracle_sees_the_future(wants: Wants, rule: str, data: st.DataObject) -> None:
    known = data.draw(st.integers(1, wants.num_steps))
    kept = keep(wants, KEEP_RULES[rule], 0.3)
    before = keep(wants.steps(np.arange(known)), KEEP_RULES[rule], 0.3)
    assert (kept[:known] == before).all()


@given(random_wants(), st.sampled_from(sorted(KEEP_RULES)))
def test_no_rule_foresees_the_next_step_better_than_the_oracle(wants: Wants, rule: str) -> None:
    kept, best = keep(wants, KEEP_RULES[rule], 0.3), keep(wants, oracle, 0.3)
    assert (measures.recall(wants, kept, 1) <= measures.recall(wants, best, 1)).all()


def test_stable_heads_keep_their_pages_until_they_are_ranked_again() -> None:
    wants = wants_of([[0]] + [[1]] * 15 + [[1]] * 4, [8] * 20)
    kept = keep(wants, stability, 0.25)
    assert kept[:16, 0, 0].all()
    assert not kept[:16, 0, 1].any()
    assert kept[16:, 0, 1].all()


def test_random_pages_stand_behind_the_prompt() -> None:
    wants = wants_of([[0]] * 4, [20] * 4, prompt_pages=3)
    kept = keep(wants, KEEP_RULES["random, prompt kept"], 0.3)
    assert kept[:, 0, :3].all()
    assert (kept[0] == kept[-1]).all()
    few = keep(wants, KEEP_RULES["random, prompt kept"], 0.1)
    assert few[:, 0, :3].sum() == 4  # of two pages one is being filled: the other is of the prompt


def test_misses_are_pages_that_have_left() -> None:
    # Room for two of five pages, of which the last is being filled: one of the others stays.
    wants = wants_of([[0], [0], [1], [0], [4], [0]], [5] * 6)
    (run,) = run_rule(wants, KEEP_RULES["LRU"], [0.4])
    assert run.misses.tolist() == [[3, 6]]  # 0, 1, and 0 again; the page being filled is there
    (best,) = run_rule(wants, oracle, [0.4])
    assert best.misses.tolist() == [[2, 6]]  # 1 does not push 0 out
    (roomy,) = run_rule(wants, KEEP_RULES["LRU"], [0.6])
    assert roomy.misses.tolist() == [[2, 6]]


@given(random_wants(), st.sampled_from(sorted(KEEP_RULES)), st.sampled_from([0.2, 0.4]))
def test_no_rule_misses_less_than_the_oracle(wants: Wants, rule: str, share: float) -> None:
    (run,), (best,) = (run_rule(wants, each, [share]) for each in (KEEP_RULES[rule], oracle))
    assert (best.misses[:, 0] <= run.misses[:, 0]).all()
    assert (run.misses[:, 0] <= run.misses[:, 1]).all()


# ---- marks ----


def test_marks_are_pages_and_steps() -> None:
    marks = Marks([0, 33, 50], [Stretch("explore", 30, 34), Stretch("conclude", 34, 36)])
    wants = wants_of([[0]] * 4, [5] * 4, prompt_pages=2)
    assert np.flatnonzero(marks.milestone_pages(16, wants.first_page, 5)).tolist() == [0, 2, 3]
    answer = wants.of_answer()
    assert np.flatnonzero(marks.milestone_pages(16, answer.first_page, 3)).tolist() == [0, 1]
    assert marks.steps_of("explore", 32, 4).tolist() == [0, 1]
    assert marks.steps_of("conclude", 32, 4).tolist() == [2, 3]
    assert marks.steps_of("verify", 32, 4).tolist() == []


def test_marks_survive_their_file(tmp_path: Path) -> None:
    one = Marks([3, 9], [Stretch("verify", 1, 4)], [0.25, 3.0])
    marks = {"thought/1": one, "thought/2": Marks([], [])}
    write_marks(tmp_path / "marks.jsonl", marks)
    assert read_marks(tmp_path / "marks.jsonl") == marks


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"rid": "a"}',
        '{"rid": "a", "milestones": ["x"], "phases": []}',
        '{"rid": "a", "milestones": [Infinity], "phases": []}',
        '{"rid": "a", "milestones": [1e30], "phases": []}',
        '{"rid": "\udcff", "milestones": [], "phases": []}',
        "[" * 100_000,
    ],
    ids=range(8),
)
def test_a_line_that_is_no_mark_is_one_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "marks.jsonl"
    lines = f'{{"rid": "b", "milestones": [], "phases": []}}\n{line}\n'
    path.write_bytes(lines.encode("utf-8", "surrogateescape"))
    with pytest.raises(StudyError, match=r"^line 2 of .* says no marks of a request"):
        read_marks(path)


# ---- the study ----


def far_and_near(directory: Path) -> list[PageRecording]:
    """Thoughts that look far back, and answers of another server that read where they write."""
    thoughts = [looks_back("thought", number, 8) for number in range(5)]
    answers = [looks_back("decode", number, 0) for number in range(5)]
    return [recorded(directory / "thoughts", thoughts), recorded(directory / "answers", answers)]


def finding(found: list[Finding], study: str) -> Finding:
    (one,) = (each for each in found if each.study == study)
    return one


def test_thoughts_that_look_far_back_are_told_from_answers_that_do_not(tmp_path: Path) -> None:
    found = study_thinking(far_and_near(tmp_path), {}, KINDS)
    recent = finding(found, "thinking-recency")
    rows = {
        (row["kind"], row["rule"]): row["recall at 5"]
        for row in recent.rows
        if (row["scope"], row["kept"], row["phase"]) == ("context", 0.2, "all")
    }
    assert rows["thought", "recency"] == 0 == recent.value.value
    assert rows["decode", "recency"] > 0.25
    assert rows["thought", "LFU"] > rows["thought", "recency"]
    # The first page is not among the newest, and half of what is wanted: the claim fails on its second half.
    assert recent.verdict.startswith("not supported: in a thought it holds 0.000")
    assert "nothing is said of milestones" in " ".join(finding(found, "thinking-attention").notes)


def test_wrong_evictions_are_those_of_heads_ranked_every_16_steps(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    restless = [Asked(number, 12, rng.random((48, 1, 4, 26)) ** 6, kind="thought") for number in range(4)]
    recording = recorded(tmp_path, [*restless, looks_back("decode", 9, 0)])
    found = finding(study_thinking([recording], {}, KINDS), "thinking-stability")
    (row,) = (row for row in found.rows if row["kind"] == "thought")
    thoughts = [wants for wants in read_wants(recording, 0.1, 32) if wants.kind == "thought"]
    stable = ~unstable_heads([measure_request(wants, None, 0, (0.2,)) for wants in thoughts])
    parts = sum(measures.false_evictions(wants, keep(wants, stability, 0.2)) for wants in thoughts)
    wrong, evicted = parts[stable].sum(0)
    assert 0 < row["wrong, stable"] == pytest.approx(wrong / evicted)


def test_milestones_that_are_wanted_again_are_seen(tmp_path: Path) -> None:
    steps, page = 160, 5
    mass = np.full((steps, 1, 2, 50), 1e-6)
    mass[:, 0, :, page] = 1.0
    asked = [Asked(number, 4, mass, kind="thought") for number in range(5)]
    recording = recorded(tmp_path, [*asked, looks_back("decode", 9, 0)])
    marks = {f"thought/{number}/{number}": Marks([PAGE_SIZE * page + 1], []) for number in range(5)}
    score = finding(study_thinking([recording], marks, KINDS), "thinking-attention")
    (row,) = (row for row in score.rows if row["kind"] == "thought")
    assert row["late wants, milestones"] == 1
    assert row["late wants, others"] < 0.2
    assert "milestones are wanted" in score.verdict


def test_milestones_are_told_apart_by_phase(tmp_path: Path) -> None:
    """One is wanted while nodes are entered, and no more behind it."""
    steps, explored, prompt_pages, page = 160, 130, 4, 5
    mass = np.full((steps, 1, 2, 50), 1e-6)
    mass[:explored, 0, :, page] = 1.0
    mass[explored:, 0, :, page + 1] = 1.0
    asked = [Asked(number, prompt_pages, mass, kind="thought") for number in range(4)]
    recording = recorded(tmp_path, [*asked, looks_back("decode", 9, 0)])
    ends = [prompt_pages * PAGE_SIZE + at for at in (0, explored, steps)]
    phases = [Stretch("explore", ends[0], ends[1]), Stretch("verify", ends[1], ends[2])]
    marks = {f"thought/{number}/{number}": Marks([PAGE_SIZE * page + 1], phases) for number in range(4)}
    score = finding(study_thinking([recording], marks, KINDS), "thinking-attention")
    rows = {row["phase"]: row for row in score.rows if row["kind"] == "thought"}
    assert list(rows) == ["all", "explore", "verify"]
    assert rows["explore"]["late wants, milestones"] > 0.9
    assert rows["verify"]["late wants, milestones"] < 0.3


@pytest.mark.parametrize(
    ("parts", "begin"),
    [
        ([(True, False, "a"), (True, False, "b")], "supported: a; b"),
        ([(True, False, "a"), (False, True, "b")], "not supported: a; b"),
        ([(True, False, "a"), (False, False, "b")], "undecided: a; b"),
    ],
)
def test_a_claim_of_two_parts_needs_both(parts: list[tuple[bool, bool, str]], begin: str) -> None:
    assert verdict_of_parts(*parts) == begin


def test_retracted_tokens_and_short_answers_are_left_out(tmp_path: Path) -> None:
    recording = recorded(tmp_path, [looks_back("thought", 0, 2), looks_back("thought", 1, 2, steps=8)])
    (wants,) = read_wants(recording, 0.1, 32)
    assert (wants.kind, wants.num_steps, wants.num_heads, wants.prompt_pages) == ("thought", 48, 4, 12)


def test_kinds_that_are_missing_are_named(tmp_path: Path) -> None:
    recording = recorded(tmp_path, [looks_back("chat", 0, 2)])
    with pytest.raises(StudyError, match=r"kind 'thought' .* pages of 4 tokens \(kinds there: chat\)"):
        study_thinking([recording], {}, KINDS)


def test_short_answers_of_a_control_are_measured_beside_the_others(tmp_path: Path) -> None:
    recordings = far_and_near(tmp_path)
    at_once = [looks_back("control", number, 1, steps=8) for number in range(2)]
    cut_off = looks_back("thought", 9, 2, steps=8)
    found = finding(
        study_thinking([*recordings, recorded(tmp_path / "control", [*at_once, cut_off])], {}, KINDS),
        "thinking-stability",
    )
    rows = {row["kind"]: row for row in found.rows}
    assert (rows["control"]["requests"], rows["control"]["tokens"]) == (2, 8)
    assert rows["thought"]["requests"] == 5
    assert found.p_value is not None
    assert 0 < found.p_value <= 1


def test_answers_within_the_last_page_of_their_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_recordings, "PAGE_SIZE", 64)

    def asked(kind: str, number: int, *, steps: int = 40, room: int = 1) -> Asked:
        mass = np.random.default_rng(number).random((steps, 1, 4, 14)) ** 6
        return Asked(number, 12, mass, kind=kind, room=room)

    others = [asked("thought", number) for number in range(4)]
    inside = [asked("thought", 4, room=60), asked("control", 5, steps=8, room=60)]
    recording = recorded(tmp_path / "some", [*inside, *others, asked("decode", 6)], page_size=64)
    found = study_thinking([recording], {}, KINDS)
    rows = {row["kind"]: row for row in finding(found, "thinking-attention").rows}
    assert {kind: row["requests"] for kind, row in rows.items()} == {"thought": 4, "control": 1, "decode": 1}
    assert rows["control"]["attention score, recall at 10"] is None
    assert {row["thoughts"] for row in finding(found, "thinking-residency").rows} == {2}
    recording = recorded(tmp_path / "all", [*inside, asked("decode", 6)], page_size=64)
    with pytest.raises(StudyError, match="kind 'thought' of 32 tokens or more that leave"):
        study_thinking([recording], {}, KINDS)


def test_short_lists_are_refused(tmp_path: Path) -> None:
    recording = recorded(tmp_path, [looks_back("thought", 0, 2)], share=0.1)
    with pytest.raises(StudyError, match=r"record with trace\.pages = 0\.4 or more"):
        study_thinking([recording], {}, KINDS)


def test_the_command_writes_its_findings(tmp_path: Path) -> None:
    far_and_near(tmp_path)
    directories = [str(tmp_path / name) for name in ("thoughts", "answers")]
    result = CliRunner().invoke(app, ["thinking", *directories, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for name in ("recency", "stability", "attention", "residency"):
        document = json.loads((tmp_path / f"thinking-{name}.json").read_text())
        assert document["rows"]
        assert (tmp_path / f"thinking-{name}.png").stat().st_size > 1000


def test_the_command_needs_two_kinds(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["thinking", str(tmp_path), "--normal", "thought"])
    assert result.exit_code == 2
    assert "compare two kinds" in result.output
