"""`sgl-importance replay --pages` at the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sgl_importance_lab.replay.cli import app
from sgl_importance_lab.replay.residency.page_replay import PAGE_POLICIES

from support.workloads.page_recordings import random_asked, write_asked
from support.workloads.recordings import write_recording


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    directory = tmp_path / "recorded"
    write_asked(directory, random_asked(0, requests=4, tokens=8), share=0.5)
    return directory


def run(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, " ".join(result.output.split())


def test_every_policy_gets_a_row(recording: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")  # of the history that servers keep with their pages
    out = tmp_path / "rows.json"
    policies = ",".join(PAGE_POLICIES)
    code, text = run(
        recording, "--pages", "--policies", policies, "--capacity-fraction", "0.2,0.4", "--jobs", "1",
        "--selected", "0.3", "--resident-bias", "0,1", "--json", out,
    )  # fmt: skip
    assert code == 0, text
    rows = json.loads(out.read_text())
    unbiased = [row for row in rows if not row["bias"]]
    assert {row["policy"] for row in unbiased} == set(PAGE_POLICIES)
    assert {row["policy"] for row in rows if row["bias"]} == set(PAGE_POLICIES) - {"belady"}
    best = {row["slots"]: row["loaded"] for row in unbiased if row["policy"] == "belady"}
    assert len(best) == 2
    assert all(row["loaded"] >= best[row["slots"]] for row in unbiased)
    assert all(row["loaded_share"] == row["loaded"] / row["read"] for row in rows)
    assert "ema, bias 1" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policies", "sieve", "--capacity-blocks", "3"], "unknown policy of residency 'sieve'"),
        (["--capacity-blocks", "3", "--capacity-fraction", "0.1"], "one of --capacity-blocks and"),
        (["--capacity-blocks", "3", "--selected", "0.8"], "its lists hold 5"),
        (["--capacity-blocks", "3", "--chosen"], "no selector chose pages"),
        (["--capacity-blocks", "3", "--chosen", "--resident-bias", "1"], "leave out one of --chosen"),
        (["--capacity-blocks", "3", "--resident-bias", "1"], "belady knows no bias"),
        (["--capacity-blocks", "3", "--resident-bias", "-1"], "takes numbers from 0 on"),
        (["--capacity-blocks", "3", "--plot", "pages.png"], "--pages replays page lists: leave out"),
        (["--capacity-blocks", "3", "--node-granular"], "--pages replays page lists: leave out"),
        (["--device-blocks", "3", "--capacity-blocks", "3"], "--pages replays page lists: leave out"),
        (["--chosen", "--selected", "0.3"], "leave out one of --chosen and --selected"),
        (["--chunk-tokens", "512"], "--chunk-tokens says how long nodes are: it needs --node-granular"),
        (["--format", "mooncake"], "--format says nothing to --pages: leave it out"),
        (["--tokenizer", "gpt2"], "--tokenizer says nothing to --pages: leave it out"),
        (["--block-tokens", "16"], "--block-tokens says nothing to --pages: leave it out"),
        (["--alive", "3"], "--alive says nothing to --pages: leave it out"),
        (["--seed", "1,2"], "--seed says nothing to --pages: leave it out"),
        (["--write-policy", "write_back"], "--write-policy says nothing to --pages: leave it out"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(recording: Path, words: list[str], message: str) -> None:
    code, text = run(recording, "--pages", *words)
    assert code == 2
    assert message in text


def test_a_recording_without_page_lists_is_one_line(tmp_path: Path) -> None:
    write_recording(tmp_path, queries=1)
    code, text = run(tmp_path, "--pages", "--capacity-blocks", "3")
    assert code == 2
    assert "holds no page lists" in text
