"""Ctrl-C in what takes long: one line, exit code 130, no traceback, no process left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest
from numba.core.compiler_lock import global_compiler_lock

from sgl_importance.cli import main as cli
from sgl_importance.terminal import interrupts_behind_compilation

from support.nightly_cases import rest_nightly
from support.processes import command_line
from support.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 120
PROGRAM = (sys.executable, "-c", "from sgl_importance.cli.main import main; main()")


def interrupt(command: Sequence[str], ready: Callable[[psutil.Process], bool], cwd: Path) -> tuple[int, str]:
    """Exit code and stderr of a command whose whole group gets SIGINT as soon as it is ``ready``."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A test run in the background of a shell ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    seen = psutil.Process(process.pid)
    family: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not ready(seen):
            assert process.poll() is None, f"ended before it could be interrupted: {process.communicate()[1]}"
            assert time.monotonic() < deadline, "never got to work"
            time.sleep(0.05)
        family = seen.children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
        _, alive = psutil.wait_procs(family, timeout=HANG_SECONDS)
        for left in alive:
            with suppress(psutil.NoSuchProcess):
                left.kill()
    assert not alive, "processes are left"
    return process.returncode, stderr


def has_worked(seconds: float) -> Callable[[psutil.Process], bool]:
    """The command is past its imports: it has used the processor for so long."""
    return lambda process: sum(process.cpu_times()[:2]) > seconds


def sessions(count: int) -> str:
    """A Mooncake trace of conversations that grow by two blocks a turn."""
    rows = [
        {
            "timestamp": 1000 * (session + 40 * turn),
            "input_length": 512 * (2 * turn + 2),
            "output_length": 1,
            "hash_ids": [100 * session + block for block in range(2 * turn + 2)],
        }
        for session in range(count)
        for turn in range(12)
    ]
    return "\n".join(map(json.dumps, rows)) + "\n"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text(sessions(8000))
    return path


@pytest.mark.parametrize(
    "command", rest_nightly(["replay {} --policies lhd --capacity-blocks 9999", "study reuse {}", "size {}"])
)
def test_a_command_that_reads_and_replays(
    trace: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # a first run, which compiles
    words = [*PROGRAM, *command.format(trace).split()]
    if not command.startswith("study"):
        words += ["--jobs", "1"]
    code, stderr = interrupt(words, has_worked(2.5), tmp_path)
    assert code == 130
    assert re.fullmatch(r"interrupted( after \d+ of \d+ replays)?\n", stderr), stderr


def test_while_the_commands_are_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_app", load)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")


@pytest.fixture
def hears_interrupts() -> Iterator[None]:
    """A test run in the background of a shell ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_interrupts")
@pytest.mark.parametrize("compiles", [True, False])
def test_an_interrupt_waits_for_the_compiler_only(compiles: bool) -> None:
    """LLVM calls back into Python: what is raised there is printed and dropped."""
    done: list[str] = []

    def work() -> None:
        with interrupts_behind_compilation():
            with global_compiler_lock if compiles else nullcontext():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGALRM)  # as the next look comes
                done.append("compiled")
            for _ in range(1000):
                time.sleep(0.01)
            done.append("dropped")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["compiled"] * compiles


@pytest.mark.nightly
@pytest.mark.server
def test_the_serving_benchmark_ends_its_server_and_keeps_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "serving.json"
    command = [
        sys.executable,
        str(ROOT / "benchmark/serving/run.py"),
        "--workloads",
        "fits",
        "--out",
        str(out),
    ]

    def serves(process: psutil.Process) -> bool:
        return any("sglang.launch_server" in command_line(child) for child in process.children())

    code, stderr = interrupt(command, serves, tmp_path)
    assert code == 130
    assert stderr.splitlines()[-1] == f"interrupted with 0 rows in {out}: go on with --resume"
    assert "Traceback" not in stderr
