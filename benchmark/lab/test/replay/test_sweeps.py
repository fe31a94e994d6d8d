"""Sweeps over many cells: rows of an interrupted one are taken over, and each seed is a cell of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sgl_importance_lab.replay import source_digest
from sgl_importance_lab.replay.cli import app
from sgl_importance_lab.replay.formats.detect import read_trace
from sgl_importance_lab.replay.replay_runner import Job, Row, run_job
from sgl_importance_lab.replay.report import console, journal
from sgl_importance_lab.replay.report.journal import SweepJournal, journal_file

from support.workloads.session_trace import write_session_trace

SWEEP = ("--policies", "fifo,random", "--capacity-blocks", "4,8,12", "--seed", "0,1", "--jobs", 1)
CELLS = 12


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    return write_session_trace(tmp_path / "sessions.jsonl", 30)


def _run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def _rows(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def _interrupt_after(monkeypatch: pytest.MonkeyPatch, finished: int) -> list[Job]:
    """The next sweep gets Ctrl-C when so many cells are done; the jobs that were given to it."""
    run_jobs, given = console.run_jobs, []

    def some(
        run_one: Any, traces: Sequence[Any], jobs: Sequence[Any], workers: Any
    ) -> Generator[tuple[int, Any]]:
        given.extend(jobs)
        for done, result in enumerate(run_jobs(run_one, traces, jobs, workers)):
            if done == finished:
                raise KeyboardInterrupt
            yield result

    monkeypatch.setattr(console, "run_jobs", some)
    return given


def test_an_interrupted_sweep_goes_on_where_it_stopped(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole.json", tmp_path / "rows.json"
    assert _run(trace_file, *SWEEP, "--json", whole).exit_code == 0
    assert not journal_file(whole).exists()
    with monkeypatch.context() as patched:
        assert len(_interrupt_after(patched, 5)) == 0
        stopped = _run(trace_file, *SWEEP, "--json", out)
    assert stopped.exit_code == 130
    assert stopped.stderr == "interrupted after 5 of 12 replays: the same command goes on from there\n"
    assert not out.exists()
    with journal_file(out).open("ab") as file:
        file.write(b"a line that was cut o")
    given = _interrupt_after(monkeypatch, CELLS)
    gone_on = _run(trace_file, *SWEEP, "--json", out)
    assert gone_on.exit_code == 0, gone_on.output
    assert f"going on after 5 of 12 replays, from {journal_file(out)}\n" in gone_on.stderr
    assert len(given) == CELLS - 5
    assert _rows(out) == _rows(whole)
    assert not journal_file(out).exists()


def test_rows_of_other_cells_are_not_taken_over(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.json"
    traces = [read_trace(trace_file)]
    jobs = [Job(0, "fifo", 4), Job(0, "fifo", 8)]

    def taken_over(*wanted: Job) -> list[int]:
        kept = SweepJournal(out, Row, traces, wanted)
        kept.close()
        return sorted(kept.rows)

    written = SweepJournal(out, Row, traces, jobs)
    for index, job in enumerate(jobs):
        written.add(index, run_job(traces, job))
    written.close()
    assert taken_over(*reversed(jobs)) == [0, 1]
    assert taken_over(Job(0, "fifo", 4, seed=1), jobs[0]) == [1]
    assert taken_over(*jobs) == [0], "the sweep before had left the other one out"
    traces[0].input_tokens[0] += 1
    assert taken_over(jobs[0]) == []
    traces[0].input_tokens[0] -= 1
    kept = SweepJournal(out, Row, traces, jobs[:1])
    kept.add(0, run_job(traces, jobs[0]))
    kept.close()
    monkeypatch.setattr(journal, "source_digest", lambda: "another version")
    assert taken_over(jobs[0]) == []


def test_another_process_knows_the_cells_again() -> None:
    """Hashes of strings, and so the order of sets of them, differ from process to process."""
    program = """
from sgl_importance_lab.replay.lower_tiers.tiered_setup import TieredSetup, TierSize, WritePolicy
from sgl_importance_lab.replay.report.journal import _cell_digest
from sgl_importance_lab.replay.report.tier_report import TieredJob
from sgl_importance.tiers import Tier
setup = TieredSetup((TierSize(Tier.DEVICE, 4, "lru", float("inf")),), WritePolicy.WRITE_BACK, 1.0, 1)
print(_cell_digest("a trace", TieredJob(0, setup)))
"""
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "123"
    }
    assert len(digests) == 1


def test_the_digest_of_the_code_is_of_every_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source_digest.sgl_importance, "__path__", [str(tmp_path)])
    digest = source_digest.source_digest.__wrapped__
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text("1")
    before = digest()
    (tmp_path / "a" / "b.py").write_text("2")
    changed = digest()
    (tmp_path / "a" / "b.py").rename(tmp_path / "a" / "c.py")
    assert len({before, changed, digest()}) == 3


def test_each_seed_is_a_table_and_decides_the_draws(trace_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    result = _run(trace_file, *SWEEP, "--json", out)
    assert result.exit_code == 0, result.output
    rows = _rows(out)
    assert {(row["trace"], row["seed"]) for row in rows} == {("sessions, seed 0", 0), ("sessions, seed 1", 1)}
    assert "sessions, seed 1: 30 requests" in result.output
    hits = {
        policy: [
            [row["hit_blocks"] for row in rows if (row["policy"], row["seed"]) == (policy, seed)]
            for seed in (0, 1)
        ]
        for policy in ("fifo", "random")
    }
    assert hits["fifo"][0] == hits["fifo"][1]
    assert hits["random"][0] != hits["random"][1]


def test_each_seed_decides_the_draws_over_tiers(trace_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    sizes = ("--device-blocks", 4, "--host-blocks", 6, "--host-policy", "random", "--jobs", 1)
    result = _run(trace_file, "--policies", "random", *sizes, "--seed", "0,1,0", "--json", out)
    assert result.exit_code == 0, result.output
    first, second = ([tier["hit_blocks"] for tier in row["tiers"]] for row in _rows(out))
    assert first != second
    result = _run(trace_file, "--policies", "random", *sizes, "--seed", "1", "--json", out)
    assert [tier["hit_blocks"] for tier in _rows(out)[0]["tiers"]] == second


@pytest.mark.parametrize("seed", ["", "x", "-1", "0,,1", "1.5"])
def test_bad_seeds_name_the_cure(trace_file: Path, seed: str) -> None:
    result = _run(trace_file, "--capacity-blocks", "4", f"--seed={seed}")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --seed takes numbers")


@pytest.mark.parametrize("jobs", ["0", "-1", "", "two", "ray:", "rays", "²"])
def test_bad_jobs_name_the_cure(trace_file: Path, jobs: str) -> None:
    result = _run(trace_file, "--capacity-blocks", "4", f"--jobs={jobs}")
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: --jobs takes a number of processes such as 4, ray, or ray:10.0.0.1:6379, not {jobs!r}\n"
    )


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_sweep_that_ended_before_its_file_was_written_only_writes_it(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    out = tmp_path / "rows.json"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", _cut_off_at(out, Path.replace))
        assert _run(trace_file, *SWEEP[:-1], jobs, "--json", out).exit_code != 0
    assert not out.exists()
    again = _run(trace_file, *SWEEP[:-1], jobs, "--json", out)
    assert again.exit_code == 0, again.output
    assert f"going on after {CELLS} of {CELLS} replays" in again.stderr
    assert len(_rows(out)) == CELLS


def _cut_off_at(target: Path, replace: Any) -> Any:
    def cut_off(source: Path, to: Path) -> Path:
        if to == target:
            raise KeyboardInterrupt
        renamed: Path = replace(source, to)
        return renamed

    return cut_off
