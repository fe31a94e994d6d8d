"""`sgl-importance replay` as users run it."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sgl_importance_lab.replay.cli import app
from sgl_importance_lab.replay.formats.detect import read_trace
from sgl_importance_lab.replay.replay_runner import Job, ReplayError, blocked_for_children, run_job, run_jobs
from sgl_importance_lab.replay.report import console, plot

from support.waiting import HANG_SECONDS, wait_until
from support.workloads.replay_jobs import die, sleep
from support.workloads.session_trace import write_session_trace

ROW_FIELDS = [
    "trace",
    "policy",
    "capacity_blocks",
    "seed",
    "requests",
    "blocks",
    "hit_blocks",
    "block_hit_rate",
    "token_hit_rate",
    "full_hit_rate",
    "seconds",
    "refused_requests",
]


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    return write_session_trace(tmp_path / "sessions.jsonl", 30)


def _run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def test_rows_table_and_equivalent_capacity(trace_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    result = _run(
        trace_file, "--policies", "fifo,lru", "--capacity-blocks", "4,25", "--json", out, "--jobs", 1
    )
    assert result.exit_code == 0, result.output
    rows = _rows(out)
    assert [list(row) for row in rows] == [ROW_FIELDS] * 4
    assert [(row["policy"], row["capacity_blocks"]) for row in rows] == [
        ("fifo", 4),
        ("fifo", 25),
        ("lru", 4),
        ("lru", 25),
    ]
    trace = read_trace(trace_file)
    for row in rows:
        assert row["trace"] == "sessions"
        assert (row["requests"], row["blocks"]) == (30, trace.num_accesses)
        assert row["block_hit_rate"] == row["hit_blocks"] / row["blocks"]
        assert row["token_hit_rate"] == row["block_hit_rate"]  # all blocks are full
        assert row["full_hit_rate"] == 0
        assert row["seconds"] > 0
        rates = f"{row['block_hit_rate']:.4f} +{row['token_hit_rate']:.4f} +0.0000"
        assert re.search(rf"{row['policy']} +{row['capacity_blocks']} .*{rates}", result.output)
    assert re.search(r"lru +25 .* 25 +1\.00x", result.output)
    assert "31 unique blocks of 512 tokens" in result.output


def test_fractions_are_of_unique_blocks(trace_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    fractions = ("--capacity-fraction", "0.001,0.1,0.5")
    assert _run(trace_file, "--policies", "lru", *fractions, "--json", out).exit_code == 0
    assert [row["capacity_blocks"] for row in _rows(out)] == [1, 3, 15]


@pytest.mark.parametrize(("mode", "hit_blocks"), [(None, 2), ("--object-level", 0), ("--node-granular", 0)])
def test_modes(tmp_path: Path, mode: str | None, hit_blocks: int) -> None:
    """Of a path of three, what is left after a path of two went through a cache of four."""
    path, out = tmp_path / "paths.jsonl", tmp_path / "rows.json"
    record = {"timestamp": 0, "output_length": 1}
    paths = ([1, 2, 3], [4, 5], [1, 2, 3])
    path.write_text(
        "\n".join(json.dumps(record | {"input_length": 512 * len(ids), "hash_ids": ids}) for ids in paths)
    )
    args = [path, "--policies", "lru", "--capacity-blocks", "4", "--json", out]
    result = _run(*args, mode) if mode else _run(*args)
    assert result.exit_code == 0, result.output
    assert _rows(out)[0]["hit_blocks"] == hit_blocks


def test_nodes_are_chunks_and_what_is_too_long_is_refused(tmp_path: Path) -> None:
    path, out = tmp_path / "paths.jsonl", tmp_path / "rows.json"
    record = {"timestamp": 0, "output_length": 1}
    paths = ([1, 2, 3], [4, 5], [1, 2, 3], [6, 7, 8, 9, 10])
    path.write_text(
        "\n".join(json.dumps(record | {"input_length": 512 * len(ids), "hash_ids": ids}) for ids in paths)
    )
    args = [path, "--policies", "fifo", "--capacity-blocks", "4", "--json", out]
    result = _run(*args, "--node-granular", "--chunk-tokens", 1024)
    assert result.exit_code == 0, result.output
    row = _rows(out)[0]
    assert (row["requests"], row["refused_requests"], row["hit_blocks"]) == (3, 1, 2)
    assert "Refused, as longer than the cache, and in no rate: 1 at 4 blocks, of 4 requests" in result.output
    refused = _run(*args, "--chunk-tokens", 1024)
    assert refused.exit_code != 0
    assert "it needs --node-granular" in refused.output


def test_tiers_of_whole_nodes_are_ranked_by_one_policy(tmp_path: Path) -> None:
    """Two texts of two blocks, a device of two, with one to spare, and a host of four."""
    path, out = tmp_path / "paths.jsonl", tmp_path / "rows.json"
    record = {"timestamp": 0, "output_length": 1, "input_length": 1025}
    paths = ([1, 2, 3], [4, 5, 6], [1, 2, 7])
    path.write_text("\n".join(json.dumps(record | {"hash_ids": ids}) for ids in paths))
    sizes = ["--device-blocks", 4, "--host-blocks", 4, "--write-policy", "write_back"]
    result = _run(path, *sizes, "--node-granular", "--policies", "lru,importance", "--json", out)
    assert result.exit_code == 0, result.output
    for row, policy in zip(_rows(out), ("lru", "importance"), strict=True):
        assert [tier["policy"] for tier in row["tiers"]] == [policy, policy]
        assert [tier["hit_tokens"] for tier in row["tiers"]] == [0, 1024]
        assert row["recomputed_tokens"] == 2 * 1025 + 1


def test_traces_of_one_name_are_told_apart(trace_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    copy = folder / trace_file.name
    copy.write_text(trace_file.read_text())
    out = tmp_path / "rows.json"
    args = ("--policies", "lru", "--capacity-blocks", "4", "--json", out, "--jobs", 1)
    assert _run(trace_file, copy, *args).exit_code == 0
    assert [row["trace"] for row in _rows(out)] == [str(trace_file), str(copy)]


def test_tiers(trace_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    sizes = ("--device-blocks", 4, "--host-blocks", 31, "--bytes-per-token", 1000)
    rates = ("--host-gbps", 0.001, "--prefill-tokens-per-second", 512)
    result = _run(trace_file, "--policies", "lru", *sizes, *rates, "--json", out)
    assert result.exit_code == 0, result.output
    (row,) = _rows(out)
    device, host = row["tiers"]
    assert device["hit_blocks"] + host["hit_blocks"] == row["blocks"] - 31
    assert host["loaded_bytes"] == host["hit_tokens"] * 1000
    assert row["recomputed_tokens"] == 31 * 512
    seconds = 31.0 + host["loaded_bytes"] / 1e6
    assert row["ttft_mean"] == pytest.approx(seconds / 30)
    assert f"mean {seconds / 30:.3f} s" in result.output


def test_bad_records_end_the_run_or_are_counted(trace_file: Path) -> None:
    lines = trace_file.read_text().splitlines()
    lines[4] = '{"timestamp": 0}'
    lines[7] = lines[7][:-3]
    trace_file.write_text("\n".join(lines))
    args = (trace_file, "--policies", "lru", "--capacity-blocks", "4")
    result = _run(*args)
    assert result.exit_code == 2
    cause = "Object missing required field `input_length`"
    assert result.stderr.splitlines() == [f"error: {trace_file}:5: {cause}"]
    skipping = _run(*args, "--skip-bad")
    assert skipping.exit_code == 0
    assert skipping.stderr.splitlines() == [f"skipped 2 bad records, first {trace_file}:5: {cause}"]
    assert "28 requests" in skipping.stdout


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--policies", "lfru"], "unknown policy 'lfru'; known: random, fifo, lru"),
        (["--policies", ","], "no policy is named: name at least one, such as lru"),
        (["--capacity-blocks", "many"], "--capacity-blocks takes numbers such as 1827,3655, not 'many'"),
        (["--capacity-blocks", "0"], "--capacity-blocks takes numbers above 0, not '0'"),
        (["--capacity-blocks", "4", "--capacity-fraction", "0.1"], "say how large the cache is: one of"),
        ([], "say how large the cache is: one of"),
        (["--capacity-blocks", "9" * 30], "--capacity-blocks takes numbers up to 2**53"),
        (["--capacity-fraction", "1e300"], "--capacity-fraction takes numbers up to 2**53"),
        (["--capacity-fraction", "nan"], "--capacity-fraction takes numbers above 0, not 'nan'"),
        (["--capacity-blocks", "4", "--format", "csv"], "unknown format 'csv'; known: "),
        (["--capacity-blocks", "4", "--json", "no/where.json"], "no directory for no/where.json"),
        (["--capacity-blocks", "4", "--plot", "a.txt"], "--plot cannot write 'a.txt'"),
        (["--capacity-blocks", "4", "--object-level", "--node-granular"], "objects have no nodes"),
        (["--capacity-blocks", "4", "--host-blocks", "4"], "need --device-blocks"),
        (["--device-blocks", "4", "--object-level"], "--device-blocks replays tiers"),
        (
            ["--device-blocks", "4", "--host-blocks", "4", "--node-granular", "--policies", "fifo"],
            "whole nodes are ranked on both tiers by one of lru and importance",
        ),
        (["--device-blocks", "4", "--node-granular"], "give these two, and no storage"),
        (
            ["--device-blocks", "4", "--host-blocks", "4", "--host-policy", "lru,fifo"],
            "--host-policy takes one policy, not 'lru,fifo'",
        ),
        (
            [
                "--device-blocks",
                "4",
                "--host-blocks",
                "4",
                "--host-policy",
                "belady",
                "--write-policy",
                "write_back",
            ],
            "belady follows the requests",
        ),
        (["--device-blocks", "4", "--host-policy", "lfru"], "unknown policy 'lfru'"),
        (["--device-blocks", "4", "--storage-policy", "lfru"], "unknown policy 'lfru'"),
        (["--capacity-blocks", "4", "--chosen"], "--chosen needs --pages: add that, or leave it out"),
        (
            ["--capacity-blocks", "4", "--bytes-per-token", "9"],
            "--bytes-per-token needs --tiers or --device-blocks",
        ),
        (["--device-blocks", "4", "--price-computed", "3"], "--price-computed says nothing to --device-"),
    ],
)
def test_wrong_input_gets_one_line(trace_file: Path, args: list[str], line: str) -> None:
    result = _run(trace_file, *args)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")
    assert line in result.stderr


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize("option", ["--prefill-tokens-per-second", "--price-computed", "--selected"])
def test_numbers_that_nothing_can_be_counted_with_are_refused(
    trace_file: Path, option: str, number: str
) -> None:
    """The cost model takes no rate without an end, and JSON knows no such price."""
    result = _run(trace_file, "--device-blocks", 4, option, number)
    assert result.exit_code == 2
    assert f"'{option}'" in result.output


def test_objects_without_prefixes_need_the_object_level(tmp_path: Path) -> None:
    path = tmp_path / "t.oracleGeneral"
    path.write_bytes(bytes(16) + b"\xff" * 8)
    result = _run(path, "--capacity-blocks", "4", "--policies", "lru")
    assert result.exit_code == 2
    assert result.stderr == f"error: {path}: its objects have no prefixes: add --object-level\n"
    assert _run(path, "--capacity-blocks", "4", "--policies", "lru", "--object-level").exit_code == 0


def test_picture(trace_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "rates.svg"
    out = tmp_path / "rows.json"
    args = ("--policies", "lru,fifo", "--capacity-blocks", "4,12", "--plot", picture, "--json", out)
    result = _run(trace_file, *args, "--jobs", 1)
    assert result.exit_code == 0, result.output
    assert picture.read_text().lstrip().startswith("<?xml")
    assert {row["policy"] for row in _rows(out)} == {"lru", "fifo"}  # the optimum is only drawn


def test_missing_matplotlib_is_said_before_the_work(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    monkeypatch.setattr(console, "read_trace", lambda *args, **kwargs: pytest.fail("the work began"))
    result = _run(trace_file, "--capacity-blocks", "4", "--plot", "a.png")
    assert result.exit_code == 2
    assert result.stderr == "error: --plot needs matplotlib: pip install './benchmark/lab[replay]'\n"


def test_processes_give_the_rows_of_one(trace_file: Path) -> None:
    traces = [read_trace(trace_file)]
    jobs = [Job(0, policy, capacity) for policy in ("fifo", "belady") for capacity in (3, 9)]
    alone = [row for _, row in run_jobs(run_job, traces, jobs, 1)]
    together = dict(run_jobs(run_job, traces, jobs, 2))
    for index, row in enumerate(alone):
        other = together[index]
        assert (row.policy, row.capacity_blocks, row.hit_blocks) == (
            other.policy,
            other.capacity_blocks,
            other.hit_blocks,
        )


def test_a_dead_process_is_an_error_and_no_hang(trace_file: Path) -> None:
    jobs = [Job(0, "lru", 1), Job(0, "lru", 2)]
    with pytest.raises(ReplayError, match="a replay process died"):
        list(run_jobs(die, [read_trace(trace_file)], jobs, 2))


def test_leaving_early_does_not_wait_for_the_processes(trace_file: Path, tmp_path: Path) -> None:
    done = tmp_path / "done"
    jobs = [Job(0, str(done), seconds) for seconds in (0, 60, 60)]
    others = set(multiprocessing.active_children())
    results = run_jobs(sleep, [read_trace(trace_file)], jobs, 2)
    assert next(results) == (0, 0)
    results.close()
    assert done.read_text() == "0\n", "a job was waited for"
    assert set(multiprocessing.active_children()) <= others


def _running_in_group(group: int) -> list[int]:
    """Processes of the group that are not just waiting to be reaped."""
    running = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, member_of = stat.read_text().rpartition(") ")[2].split()[:3]
            if int(member_of) == group and state != "Z":
                running.append(int(stat.parent.name))
    return running


def test_ctrl_c_that_another_thread_gets_waits_too() -> None:
    """The kernel gives a signal to any thread that takes it, such as a progress bar's."""
    is_over, ended = threading.Event(), []
    woken, wakes = socket.socketpair()
    other = threading.Thread(target=is_over.wait)
    other.start()

    def interrupted() -> None:
        with blocked_for_children(signal.SIGINT):
            assert other.ident is not None
            signal.pthread_kill(other.ident, signal.SIGINT)
            assert woken.recv(1)  # the other thread has it
            ended.append(not is_over.is_set())

    woken.settimeout(HANG_SECONDS)
    wakes.setblocking(False)
    before = signal.set_wakeup_fd(wakes.fileno())
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever a test before this one left
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.set_wakeup_fd(before)
        is_over.set()
        other.join()
        woken.close()
        wakes.close()
    assert ended == [True]


@pytest.mark.nightly  # By day test/abuse/test_interrupts.py interrupts a replay.
def test_the_command_and_ctrl_c(tmp_path: Path) -> None:
    """Through the installed entry point: help starts fast, Ctrl-C ends all processes with exit code 130."""
    command = [str(Path(sys.executable).with_name("sgl-importance")), "replay"]
    shown = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, timeout=2 * HANG_SECONDS, check=True
    )
    assert "--capacity-fraction" in shown.stdout

    trace = write_session_trace(tmp_path / "long.jsonl", 1500)
    capacities = ",".join(str(size) for size in range(2, 1200, 2))
    args = [str(trace), "--policies", "gdsf", "--capacity-blocks", capacities, "--jobs", "2"]
    process = subprocess.Popen(
        [*command, *args],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A test run in the background of a shell ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:

        def is_at_work() -> bool:
            assert process.poll() is None, "ended before it could be interrupted"
            running = _running_in_group(process.pid)
            return len(running) >= len(["command", "resource tracker", "worker", "worker"])

        wait_until(is_at_work)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=HANG_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130
    assert re.fullmatch(r"interrupted after \d+ of 599 replays\n", stderr)
    wait_until(lambda: not _running_in_group(process.pid))  # processes would be left
