"""Studies on recordings made by hand: their arithmetic, their verdicts, their files."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.observe.trace.records import Detail
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance_lab.study import cli as study_cli
from sgl_importance_lab.study import study_report
from sgl_importance_lab.study.anticipation import histories, merged, recall, step_scores
from sgl_importance_lab.study.cli import app
from sgl_importance_lab.study.documents import shared_contexts
from sgl_importance_lab.study.g import Replayed, conclude, paired_blocks, rate_difference, server_notes
from sgl_importance_lab.study.h1 import context_band, study_h1
from sgl_importance_lab.study.h2 import agreements, study_h2
from sgl_importance_lab.study.recording import Recording, load_recording
from sgl_importance_lab.study.sensitivity import study_sensitivity
from sgl_importance_lab.study.shuffled_policy import ShuffledImportancePolicy
from sgl_importance_lab.study.statistics import jaccard, mean_of, top_pages
from sgl_importance_lab.study.study_report import StudyError

from support.workloads.recordings import (
    PAGE_SIZE,
    make_fold,
    make_query,
    make_recording,
    make_step,
    write_recording,
)

# ---- recordings ----


def test_a_query_is_its_folds_by_their_weights() -> None:
    query = make_query(
        [0, 1, 2], folds=[make_fold([1, 0], 0.25), make_fold([0, 0.5, 0.5], 0.75, first=False)]
    )
    np.testing.assert_allclose(query.body(), [0.25, 0.375, 0.375])


def test_what_was_written_is_loaded(tmp_path: Path) -> None:
    write_recording(tmp_path, queries=3, contexts=2)
    recording = load_recording(tmp_path)
    assert [query.clock for query in recording.queries] == list(range(1, 7))
    query = recording.queries[4]
    assert (query.kind, len(query.prefill), query.output_tokens) == ("documents", 1, 3)
    # Three steps were emitted; the third ran behind the last token.
    assert [step.seq_len for step in query.decode] == [query.input_tokens + 1, query.input_tokens + 2]
    assert query.body().sum() == pytest.approx(1)


paths = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(paths, st.integers(1, 4), st.integers(1, 3))
def test_shared_contexts_are_the_longest_prefixes_shared_often(
    branches: list[list[int]], min_queries: int, min_pages: int
) -> None:
    names: dict[tuple[int, ...], int] = {}
    prompts = []
    for branch in branches:
        prefixes = [tuple(branch[: i + 1]) for i in range(len(branch))]
        prompts.append([names.setdefault(prefix, len(names)) for prefix in prefixes])
    found = shared_contexts(
        [make_query(prompt) for prompt in prompts], min_queries=min_queries, min_pages=min_pages
    )
    count = Counter(tuple(prompt[: i + 1]) for prompt in prompts for i in range(len(prompt)))
    often = {prefix for prefix, number in count.items() if number >= min_queries}
    longest = {p for p in often if not any(q[: len(p)] == p and q != p for q in often)}
    expected = {p: count[p] for p in longest if len(p) >= min_pages}
    assert {context.pages: len(context.queries) for context in found} == expected


# ---- h2 ----


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 6), st.integers(3, 12), st.integers(0, 1000))
def test_agreement_leaves_the_query_itself_out(queries: int, pages: int, seed: int) -> None:
    scores = np.random.default_rng(seed).random((queries, pages))
    expected = []
    for i in range(queries):
        others = sum(scores[j] for j in range(queries) if j != i)
        expected.append(jaccard(top_pages(scores[i], 0.2), top_pages(others, 0.2)))
    assert agreements(scores, 0.2) == expected


def queries_looking_at(pages: list[int], queries: int = 60) -> list:
    found = []
    for i in range(queries):
        body = np.full(10, 0.01)
        body[pages[i % len(pages)]] = 1.0
        found.append(make_query([*range(10), 100 + i], folds=[make_fold([*body, 0])]))
    return found


def test_h2_tells_agreement_from_chance() -> None:
    same = study_h2([make_recording(queries_looking_at([4]))])
    assert (same.value.value, same.verdict) == (1.0, "supported: above 0.5")
    different = study_h2([make_recording(queries_looking_at(list(range(10))))])
    assert different.value.value == 0.0
    assert different.verdict.startswith("not supported")
    half = study_h2([make_recording(queries_looking_at([4, 4, 4, 7, 8, 4, 9]))])
    assert half.value.value == pytest.approx(35 / 60, abs=0.01)


def test_too_few_queries_have_a_number_and_no_verdict() -> None:
    few = study_h2([make_recording(queries_looking_at([4], queries=4))], min_queries=2)
    assert few.value.n == 4
    assert few.verdict == "none: n = 4, and fewer than 5 decide nothing"
    enough = study_h2([make_recording(queries_looking_at([4], queries=5))], min_queries=2)
    assert enough.verdict == "supported: above 0.5"


def test_one_unit_has_no_interval() -> None:
    one, two = mean_of([0.25]), mean_of([0.25, 0.75])
    assert (str(one), one.ends) == ("0.250 (no interval)", (None, None))
    assert two.ends == (two.low, two.high)
    assert two.from_one().n == 2


def test_one_stream_has_a_number_and_no_verdict() -> None:
    """A stream of steps that want the same page: EMA keeps it, and a single stream decides nothing."""
    long = make_query(range(12), decode=[make_step([1.0] + [0.0] * 11)] * 30)
    finding = study_h1([make_recording([long])])
    assert finding.value.n == 1
    assert finding.verdict.startswith("none: n = 1")
    assert {(row["streams"], row["low"], row["high"]) for row in finding.rows} == {(1, None, None)}
    five = study_h1([make_recording([long] * 5)])
    assert five.value.n == 5
    assert not five.verdict.startswith("none")


def test_h2_decides_by_recordings_of_the_same_settings() -> None:
    base = make_recording(queries_looking_at([4]), "base")
    layer = make_recording(queries_looking_at(list(range(10))), "layer", layers=(1,))
    finding = study_h2([base, layer])
    assert {row["workload"]: row["jaccard"] for row in finding.rows} == {
        "base: documents": 1.0,
        "layer: documents": 0.0,
    }
    assert finding.value.value == 1.0


def test_too_few_queries_are_one_line() -> None:
    with pytest.raises(StudyError, match=r"50 queries .* record more questions about fewer documents"):
        study_h2([make_recording(queries_looking_at([4], queries=40))])


# ---- sensitivity ----


@settings(max_examples=50, deadline=None)
@given(st.integers(6, 12), st.integers(10, 20), st.sampled_from([0.5, 4.0, np.inf]), st.integers(0, 99))
def test_recall_is_that_of_a_decayed_sum(queries: int, pages: int, half_life: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    predictors, targets = rng.random((queries, pages)), rng.random((queries, pages))
    before = histories(predictors, half_life)
    assert not before[0].any()
    for i in range(1, queries):
        history = sum(predictors[j] * 0.5 ** ((i - 1 - j) / half_life) for j in range(i))
        np.testing.assert_allclose(before[i], history)
        wanted = top_pages(targets[i], 0.1)
        assert recall(before[i], targets[i]) == len(wanted & top_pages(before[i], 0.2)) / len(wanted)


def test_answers_are_found_where_queries_look() -> None:
    # Query i looks at page 4 in the first half, at page 7 in the second; the answer is always on page 7.
    queries = queries_looking_at([4] * 30 + [7] * 30)
    for i, query in enumerate(queries):
        query.rid = f"documents/0/{i}"
    answers = {query.rid: 7 * PAGE_SIZE + 3 for query in queries}
    (row, *_) = study_sensitivity([make_recording(queries, detail=Detail.FOLDS)], answers=answers).rows
    # Five queries are only history.
    assert row["own answer"] == pytest.approx(30 / 55)
    assert row["earlier answer"] == pytest.approx(29 / 55)


def test_a_workload_of_other_requests_is_refused() -> None:
    recording = make_recording(queries_looking_at([4]), detail=Detail.FOLDS)
    with pytest.raises(StudyError, match="no request of the workload is in hand"):
        study_sensitivity([recording], answers={"another/0/0": 3})


def test_larger_pages_are_sums_or_maxima() -> None:
    scores = np.array([[1.0, 2, 3, 4, 5], [5, 4, 3, 2, 1]])
    assert merged(scores, 2).tolist() == [[3, 7], [9, 5]]
    assert merged(scores, 2, largest=True).tolist() == [[2, 4], [5, 3]]
    assert merged(scores[0], 5).tolist() == [15]


def test_steps_weigh_prefill_and_decode_alike() -> None:
    query = make_query(
        range(3),
        prefill=[make_step([1, 0], "prefill", query_tokens=3), make_step([0, 1], "prefill", query_tokens=1)],
        decode=[make_step([0, 0, 1]), make_step([1, 0, 0])],
    )
    np.testing.assert_allclose(step_scores(query, "mass"), [0.375 + 0.25, 0.125, 0.25])
    np.testing.assert_allclose(step_scores(query, "mass", interval=2), [0.375, 0.125, 0.5])


def test_one_setting_at_a_time(tmp_path: Path) -> None:
    write_recording(tmp_path / "base")
    options = {"policy": "observe", "half_life_queries": 32.0, "window": 8, "g": "auto"}
    write_recording(tmp_path / "window", options=options)
    write_recording(tmp_path / "both", options=options, layers=(1,))
    write_recording(tmp_path / "other", options=options, queries=50)
    base, window, both, other = (load_recording(tmp_path / n) for n in ("base", "window", "both", "other"))
    finding = study_sensitivity([base, window])
    row = next(row for row in finding.rows if row["setting"] == "window")
    # The same scores under another name change nothing.
    assert (row["value"], row["change"], row["change_low"], row["change_high"]) == ("8", 0, 0, 0)
    with pytest.raises(StudyError, match="change one setting at a time"):
        study_sensitivity([base, both])
    with pytest.raises(StudyError, match="lacks 20 requests"):
        study_sensitivity([base, other])


# ---- g ----


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=70))
def test_blocks_keep_every_request_once(hits: list[tuple[int, int]]) -> None:
    queries = [make_query([0, 1, 2]) for _ in hits]
    blocks = paired_blocks(queries, [a for a, _ in hits], [b for _, b in hits])
    assert len(blocks) == min(20, len(hits))
    assert blocks.sum(axis=0).tolist() == [sum(a for a, _ in hits), sum(b for _, b in hits), 12 * len(hits)]
    value = rate_difference(blocks).value
    assert value == pytest.approx(sum(a - b for a, b in hits) / (12 * len(hits)))


def replayed(**hits: int) -> Replayed:
    queries = [make_query([0, 1, 2]) for _ in range(40)]
    arms = {"lru": 0, "ours": 0, "g1": 0, "shuffled": 0} | hits
    return Replayed(make_recording(queries), 0.1, 5, {arm: [value] * 40 for arm, value in arms.items()})


def test_the_same_requests_at_more_capacities_are_no_more_units() -> None:
    draws = random.Random(0)
    recording = make_recording([make_query([0, 1, 2]) for _ in range(400)])
    hits = {arm: [draws.randint(0, 12) for _ in range(400)] for arm in ("lru", "ours", "g1", "shuffled")}
    at = [Replayed(recording, capacity, 5, hits) for capacity in (0.1, 0.2, 0.4, 0.8)]
    assert conclude(at).value == conclude(at[:1]).value
    another = make_recording([make_query([0, 1, 2]) for _ in range(400)])
    assert conclude([at[0], Replayed(another, 0.1, 5, hits)]).value.n == 2 * conclude(at).value.n


def test_a_gain_that_shuffled_factors_have_too_is_not_importance() -> None:
    assert conclude([replayed(ours=6)]).verdict == "supported on these recordings"
    assert conclude([replayed(ours=6, shuffled=6)]).verdict.startswith("not supported: shuffled")
    assert conclude([replayed(g1=6)]).verdict.startswith("refuted")
    assert conclude([replayed()]).verdict.startswith("undecided")


def test_servers_are_compared_request_by_request() -> None:
    def server(g: str, hits: list[int]) -> Recording:
        queries = [make_query([0, 1, 2], rid=f"k/0/{i}", cached_tokens=hit) for i, hit in enumerate(hits)]
        return make_recording(queries, g, options={"policy": "importance", "g": g})

    # The second server had one request more.
    notes = server_notes([server("on", [8, 4, 8]), server("off", [4, 4, 4, 8])])
    assert "g on, 64 device tokens, token hit rate 0.5556" in notes[0]
    assert "3 requests that both had: on minus off 0.222" in notes[2]
    assert server_notes([make_recording([make_query([0])])]) == []


def test_shuffling_keeps_the_factors_and_loses_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = CostModel(1e-5, 1e-9, 4096, 1e9, 1e8)
    nodes = [NodeMetadata(tokens=16, depth=16 * i, page_size=16, clock=1) for i in range(400)]
    true = {id(node): 0.5 + (i % 4) / 2 for i, node in enumerate(nodes)}
    monkeypatch.setattr(ImportancePolicy, "factor", lambda self, node: true[id(node)])
    policy = ShuffledImportancePolicy(cost)
    for node in nodes:
        policy.factor(node)
    given_out = [policy.factor(node) for node in nodes]
    expected = Counter(true.values())
    assert all(abs(Counter(given_out)[factor] - number) < 30 for factor, number in expected.items())
    assert abs(np.corrcoef(given_out, list(true.values()))[0, 1]) < 0.2
    again = [policy.factor(node) for node in nodes]
    assert sum(a == b for a, b in zip(again, given_out, strict=True)) > 380


# ---- the command ----


@pytest.mark.parametrize("study", ["h1", "h2", "sensitivity"])
def test_the_command_prints_and_writes_what_it_found(tmp_path: Path, study: str) -> None:
    write_recording(tmp_path / "hand")
    out = tmp_path / "out"
    out.mkdir()
    result = CliRunner().invoke(app, [study, str(tmp_path / "hand"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    for word in ("value:", "verdict:", "another model needs recordings of its own"):
        assert word in " ".join(result.output.split())
    document = json.loads((out / f"{study}.json").read_text())
    assert document["value"]["low"] <= document["value"]["value"] <= document["value"]["high"]
    assert document["command"] == f"sgl-importance study {study} hand"
    assert document["recordings"][0]["requests"] == 120
    assert str(tmp_path) not in json.dumps(document)
    assert (out / f"{study}.png").stat().st_size > 5000


def test_recordings_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, run in enumerate(("run1", "run2")):
        write_recording(tmp_path / run / "trace", seed=seed)
    result = CliRunner().invoke(app, ["h2", "run1/trace", "run2/trace", "--no-figure"])
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "h2.json").read_text())
    assert [row["workload"] for row in document["rows"]] == ["run1/trace: documents", "run2/trace: documents"]
    assert document["value"]["n"] == sum(row["queries"] for row in document["rows"]) == 240


def test_a_recording_given_twice_is_refused(tmp_path: Path) -> None:
    write_recording(tmp_path / "trace")
    again = tmp_path / "trace" / ".." / "trace"
    result = CliRunner().invoke(app, ["h2", str(tmp_path / "trace"), str(again), "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert result.output.endswith("is given twice: name each recording once\n")


def test_a_figure_that_cannot_be_drawn_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_report, "find_spec", lambda name: None)
    monkeypatch.setattr(study_cli, "load_recording", lambda directory: pytest.fail("the work began"))
    result = CliRunner().invoke(app, ["h2", str(tmp_path), "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "give --no-figure" in result.output


@pytest.mark.parametrize(("study", "queries"), [("h2", 4), ("h1", 3), ("sensitivity", 3)])
def test_fewer_queries_are_enough_where_one_says_so(tmp_path: Path, study: str, queries: int) -> None:
    write_recording(tmp_path / "few", queries=15, contexts=1)
    words = [study, str(tmp_path / "few"), "--out", str(tmp_path), "--no-figure"]
    assert CliRunner().invoke(app, [*words, "--min-queries", "16"]).exit_code == 2
    result = CliRunner().invoke(app, [*words, "--min-queries", str(queries)])
    assert result.exit_code == 0, result.output
    assert f"n = {json.loads((tmp_path / f'{study}.json').read_text())['value']['n']}" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["h2", "{empty}"], "error: no recording in"),
        (["h2", "{few}"], "error: no prefix of 10 pages with 50 queries"),
        (["h1", "{few}", "--out", "{empty}/none"], "error: no directory"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    write_recording(tmp_path / "few", queries=5)
    places = {"empty": tmp_path / "empty", "few": tmp_path / "few"}
    words = [word.format(**places) for word in arguments]
    if "--out" not in words:
        words += ["--out", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    (line,) = result.output.strip().splitlines()
    assert line.startswith(message)


def test_context_bands_are_doublings() -> None:
    assert [context_band(n) for n in (512, 513, 1024)] == ["257-512", "513-1024", "513-1024"]
