"""scripts/fleet.py: what it would start, what it says of a program that ends, and how it ends."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import fleet
import psutil
import pytest
from fleet_processes import FleetError, Process

from support.waiting import wait_until

ROOT = Path(__file__).parents[2]


def dry_run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "fleet.py", "--dry-run", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )


def value(command: list[str], flag: str) -> str:
    """The last one wins, as in argparse."""
    return command[len(command) - command[::-1].index(flag)]


def test_servers_share_a_store_and_a_ledger_and_nothing_else(tmp_path: Path) -> None:
    ledger = "postgresql://user@host/database"
    done = dry_run(
        *("--port", "29400", "--folder", str(tmp_path), "--ledger", ledger, "--", "--page-size", "32")
    )
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [value(command, "--port") for command in commands] == ["29400", "29401"]
    for command in commands:
        assert value(command, "--kv-importance-store") == str(tmp_path / "store")
        assert value(command, "--kv-importance-ledger") == ledger
        assert value(command, "--page-size") == "32"
        assert value(command, "--kv-policy") == "importance"


@pytest.mark.parametrize("form", ["{} {}", "{}={}"])
@pytest.mark.parametrize(
    ("flag", "cure"),
    [
        ("--port", "give --port PORT in front of --"),
        ("--kv-importance-store", "give --store DIRECTORY in front of --"),
        ("--kv-importance-ledger", "give --ledger DIRECTORY in front of --"),
    ],
)
def test_a_flag_that_differs_or_is_shared_is_refused_behind_the_dashes(
    flag: str, cure: str, form: str
) -> None:
    done = dry_run("--", "--page-size", "32", *form.format(flag, "29400").split())
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"fleet.py: {flag} behind -- ")
    assert cure in line


MOONCAKE_FLAGS = (
    "--hicache-storage-backend",
    "--hicache-storage-backend-extra-config",
    "--kv-importance-store-backends",
)


@pytest.mark.parametrize("form", ["{} {}", "{}={}"])
@pytest.mark.parametrize("flag", ["--kv-importance-store", *MOONCAKE_FLAGS])
def test_what_mooncake_chooses_is_refused_behind_the_dashes(flag: str, form: str) -> None:
    done = dry_run("--store", "mooncake", "--", *form.format(flag, "any").split())
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"fleet.py: {flag} behind -- ")
    assert "leave it out, --store mooncake" in line


@pytest.mark.parametrize("flag", MOONCAKE_FLAGS)
def test_without_mooncake_its_flags_are_the_user_s(flag: str) -> None:
    done = dry_run("--port", "29400", "--", flag, "any")
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert value(shlex.split(line), flag) == "any"


@pytest.mark.parametrize("words", [["--servers", "0"], ["--servers", "-1"], ["--nodes", "0"]], ids=" ".join)
def test_a_fleet_of_none_is_refused(words: list[str]) -> None:
    done = dry_run(*words)
    assert done.returncode == 1
    assert done.stderr == f"fleet.py: {' '.join(words)} is too few: give 1 or more\n"


@pytest.mark.skipif(find_spec("mooncake") is not None, reason="Mooncake is installed")
def test_without_mooncake_the_package_is_named() -> None:
    done = dry_run("--store", "mooncake")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "pip install mooncake-transfer-engine" in line


@pytest.mark.skipif(find_spec("sglang_router") is not None, reason="sglang's router is installed")
def test_without_the_router_the_package_is_named() -> None:
    done = dry_run("--router", "29500")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "pip install sglang-router" in line


@pytest.mark.skipif(find_spec("sglang_router") is None, reason="sglang's router is not installed")
def test_the_router_knows_every_server() -> None:
    done = dry_run("--port", "29400", "--servers", "3", "--router", "29500")
    assert done.returncode == 0, done.stderr
    *servers, front = [shlex.split(line) for line in done.stdout.splitlines()]
    assert len(servers) == 3
    urls = [f"http://127.0.0.1:{value(command, '--port')}" for command in servers]
    assert front[front.index("--worker-urls") + 1 :] == urls
    assert value(front, "--port") == "29500"


def is_alive(number: int) -> bool:
    try:
        return bool(psutil.Process(number).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def process(folder: Path, script: str) -> Process:
    return Process("some", ["bash", "-c", script], "http://127.0.0.1:9/health", folder)


def test_a_program_that_ends_is_named_with_its_last_words(tmp_path: Path) -> None:
    ended = process(tmp_path, "echo first; echo the port is taken >&2; exit 3")
    ended.start()
    with pytest.raises(FleetError, match="some ended with 3: the port is taken") as failed:
        ended.wait_ready()
    assert str(tmp_path / "some.log") in str(failed.value)
    missing = process(tmp_path, "echo libibverbs.so.1: cannot open shared object file; exit 127")
    missing.start()
    with pytest.raises(FleetError, match="install libibverbs1"):
        missing.wait_ready()


def test_a_program_that_is_not_ready_in_time_names_log_and_flag(tmp_path: Path) -> None:
    slow = process(tmp_path, "sleep 600")
    slow.start()
    try:
        with pytest.raises(FleetError, match=r"some is not ready after 0\.1 s: .*some\.log.*--start-seconds"):
            slow.wait_ready(0.1)
    finally:
        slow.stop()


def test_it_ends_with_all_that_it_started(tmp_path: Path) -> None:
    parent = process(tmp_path, "trap '' TERM; sleep 600 & echo $! > child; wait; sleep 600")
    parent.command = ["bash", "-c", f"cd {tmp_path}; {parent.command[-1]}"]
    parent.start()
    number = tmp_path / "child"
    wait_until(lambda: number.exists() and number.read_text())
    child = int(number.read_text())
    assert psutil.pid_exists(child)
    parent.stop(signal.SIGKILL)
    wait_until(lambda: not is_alive(child))


FLEET = """
import signal
import sys
from argparse import Namespace
from pathlib import Path

import fleet
import fleet_processes

for each in (signal.SIGHUP, signal.SIGINT):  # which these tests may be run without, below nohup
    signal.signal(each, signal.SIG_DFL)
folder = Path(sys.argv[1])
child = "trap 'touch $0.told' TERM; echo $$ > $0.pid; while :; do sleep 0.1; done"
processes = [
    fleet_processes.Process(name, ["bash", "-c", child, str(folder / name)], "http://127.0.0.1:9/", folder)
    for name in ("first", "second")
]
fleet_processes.Process.is_healthy = lambda self: self.running is not None
fleet_processes.STOP_SECONDS = 2.0
fleet.stages = lambda options, flags: [processes]
fleet.run(Namespace(dry_run=False, folder=folder, router=None, start_seconds=60.0), [])
"""
"""A fleet of two programs that ignore SIGTERM, but for a file that says that they were told."""


STARTING = """
import os
import subprocess

def started(*words, **settings):
    program = subprocess.Popen(*words, **settings)
    file = Path(settings["stdout"].name).with_suffix(".pid")
    while not (file.exists() and file.read_text()):
        pass
    os.kill(os.getpid(), signal.SIGINT)
    return program

fleet_processes.subprocess = Namespace(**{**vars(subprocess), "Popen": started})
"""
"""For ``FLEET``: Ctrl-C while a program starts, which runs before it is known that it does."""


@pytest.mark.parametrize(
    "signals",
    [[signal.SIGHUP], [signal.SIGTERM, signal.SIGTERM], [signal.SIGINT, signal.SIGINT]],
    ids=lambda signals: " ".join(each.name for each in signals),
)
def test_nothing_outlives_it(tmp_path: Path, signals: list[signal.Signals]) -> None:
    fleet = subprocess.Popen(
        [sys.executable, "-c", FLEET, tmp_path],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'scripts'}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.DEVNULL,
    )
    files = [tmp_path / f"{name}.pid" for name in ("first", "second")]
    children: list[int] = []
    try:
        wait_until(lambda: all(each.exists() and each.read_text() for each in files))
        children = [int(each.read_text()) for each in files]
        assert all(map(is_alive, children))
        for each in signals:
            fleet.send_signal(each)
            wait_until(lambda: any(tmp_path.glob("*.told")) or fleet.poll() is not None)
        assert fleet.wait(60) == 0
        assert not any(map(is_alive, children))
    finally:
        for number in filter(is_alive, children):
            os.killpg(number, signal.SIGKILL)
        fleet.kill()
        fleet.wait()


def test_an_interrupt_while_a_program_starts_leaves_nothing_behind(tmp_path: Path) -> None:
    before, after = FLEET.split("fleet_processes.STOP_SECONDS")
    fleet = subprocess.Popen(
        [sys.executable, "-c", f"{before}{STARTING}fleet_processes.STOP_SECONDS{after}", tmp_path],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'scripts'}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.DEVNULL,
    )
    child = 0
    try:
        assert fleet.wait(60) == 0
        child = int((tmp_path / "first.pid").read_text())
        assert not is_alive(child)
        assert not (tmp_path / "second.pid").exists()
    finally:
        if child and is_alive(child):
            os.killpg(child, signal.SIGKILL)
        fleet.kill()
        fleet.wait()


def test_a_model_that_is_asked_for_by_name_is_fetched_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Servers are started from the words of serve.sh, which fetches it only when it starts one itself."""
    asked: list[list[str]] = []

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append([str(word) for word in words])
        return subprocess.CompletedProcess(words, 1)

    by_name = fleet.server(tmp_path, 0, 29400, ["--model", "smollm2"])
    by_path = fleet.server(tmp_path, 1, 29401, [f"--model-path={tmp_path}"])
    assert by_name.env["HF_HUB_OFFLINE"] == "1"
    assert by_path.env == {}
    monkeypatch.setattr(fleet.subprocess, "run", run)
    fleet.fetch_model(by_path.command)
    assert asked == []
    with pytest.raises(FleetError, match="smollm2 could not be fetched"):
        fleet.fetch_model(by_name.command)
    assert asked == [[sys.executable, str(ROOT / "scripts" / "get_model.py"), "smollm2"]]
