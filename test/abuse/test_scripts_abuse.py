"""serve.sh twice at once, and setup.sh killed half way, with a Python that only plays its part."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.servers import free_port
from support.waiting import HANG_SECONDS, wait_until

ROOT = Path(__file__).parents[2]

# Runs scripts from standard input, writes down everything else, takes long for what the file `slow` names.
PLAYING_PYTHON = f"""#!/usr/bin/env bash
root=$(cd "$(dirname "$0")/../.." && pwd)
[[ $1 == - ]] && exec {sys.executable} "$@"
echo "$*" >>"$root/calls"
if [[ -f $root/slow && "$*" == *$(cat "$root/slow")* ]]; then exec sleep 60; fi
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for project in ("pyproject.toml", "benchmark/lab/pyproject.toml"):
        (root / project).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / project, root / project)
    weights = root / "sgl_importance/embedded_model/checkpoint/model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.touch()
    python = root / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PLAYING_PYTHON)
    python.chmod(0o755)
    return root


@pytest.fixture
def start(checkout: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a script of the checkout in a process group of its own, which ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start_script(name: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["bash", str(checkout / "scripts" / name), *arguments],
            env={**os.environ, "TARGET": "cpu"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start_script
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        process.communicate()


def called(checkout: Path, text: str) -> int:
    log = checkout / "calls"
    return sum(text in line for line in log.read_text().splitlines()) if log.exists() else 0


def test_a_second_serve_on_the_port_ends_at_once(
    checkout: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """While the first one loads, and nothing listens yet: the second would load everything in vain."""
    (checkout / "slow").write_text("sglang.launch_server")
    port = str(free_port())
    first = start("serve.sh", "--port", port)
    wait_until(lambda: called(checkout, "sglang.launch_server"))
    second = start("serve.sh", "--port", port)
    _, error = second.communicate(timeout=HANG_SECONDS)
    assert second.returncode == 1
    (line,) = error.splitlines()
    assert f"starting on port {port}: wait for it or choose another --port" in line
    assert called(checkout, "sglang.launch_server") == 1
    start("serve.sh", "--port", str(free_port()))
    wait_until(lambda: called(checkout, "sglang.launch_server") == 2)
    first.kill()
    first.wait()
    start("serve.sh", "--port", port)
    wait_until(lambda: called(checkout, "sglang.launch_server") == 3)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("during", ["torch==", "--no-deps sglang==", "--editable"])
def test_a_set_up_that_was_cut_off_is_done_again(
    checkout: Path, start: Callable[..., subprocess.Popen[str]], how: signal.Signals, during: str
) -> None:
    (checkout / "slow").write_text(during)
    cut = start("setup.sh")
    wait_until(lambda: called(checkout, during))
    os.killpg(cut.pid, how)
    cut.communicate(timeout=HANG_SECONDS)
    assert cut.returncode != 0
    assert not list((checkout / ".venv").glob(".sgl-importance-*"))
    (checkout / "slow").unlink()
    again = start("setup.sh")
    _, error = again.communicate(timeout=HANG_SECONDS)
    assert again.returncode == 0, error
    assert called(checkout, during) == 2
    assert called(checkout, "import sglang") == 1
    third = start("setup.sh")
    assert third.communicate(timeout=HANG_SECONDS) == ("", "")
    assert called(checkout, during) == 2
