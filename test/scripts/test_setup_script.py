"""scripts/setup.sh with a Python that only writes down what it was asked to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

# Fails, like a connection that breaks, while the file `broken` exists and the named package is asked for.
PROJECTS = ("pyproject.toml", "benchmark/lab/pyproject.toml")
RECORDING_PYTHON = """#!/usr/bin/env bash
root=$(cd "$(dirname "$0")/../.." && pwd)
echo "$*" >>"$root/calls"
case "$*" in
  *"pip install"*) sleep 0.1 ;;
esac
if [[ -f $root/broken && "$*" == *$(cat "$root/broken")* ]]; then exit 1; fi
"""


@pytest.fixture
def checkout(scripts: Any, tmp_path: Path) -> Any:
    """A checkout with what set-up reads, and an environment that records instead of installing."""
    root = tmp_path / "checkout with a space"
    shutil.copytree(scripts.root / "scripts", root / "scripts")
    for name in PROJECTS:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(scripts.root / name, root / name)
    python = root / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(RECORDING_PYTHON)
    python.chmod(0o755)
    scripts.root = root
    return scripts


def calls(checkout: Any) -> list[str]:
    """What the recording Python was asked to do since the last look."""
    log = checkout.root / "calls"
    if not log.exists():
        return []
    lines = log.read_text().splitlines()
    log.unlink()
    return lines


def installs(checkout: Any) -> list[str]:
    return [line for line in calls(checkout) if "pip install" in line]


def test_a_second_start_does_no_work(checkout: Any) -> None:
    first = checkout.run("setup.sh")
    assert first.returncode == 0, first.stderr
    assert "==>" in first.stdout, "progress is visible"
    done = installs(checkout)
    torch, sglang = (
        next(i for i, line in enumerate(done) if text in line) for text in ("torch==", "sglang==")
    )
    assert torch < sglang, "torch first, so that nothing else chooses its build"
    assert "--no-deps" in done[sglang]
    assert re.search(r"--editable \S.*/benchmark/lab\b", done[-1]), "the laboratory is installed too"

    second = checkout.run("setup.sh")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert calls(checkout) == []


def test_an_interrupted_install_is_done_again(checkout: Any) -> None:
    broken = checkout.root / "broken"
    broken.write_text("sglang==")
    assert checkout.run("setup.sh").returncode != 0
    calls(checkout)
    broken.unlink()
    assert checkout.run("setup.sh").returncode == 0
    assert any("sglang==" in line for line in installs(checkout))


WITHOUT_PIP = """#!/usr/bin/env bash
[[ "$*" != *"-m pip --version"* ]]
"""
MAKES_NONE = """#!/usr/bin/env bash
[[ "$*" == -c* || "$*" == --version ]]
"""


@pytest.fixture
def without_pip(checkout: Any, tmp_path: Path) -> dict[str, str]:
    """A .venv as other tools make it, and a Python, below a path with a space, that would make one anew."""
    (checkout.root / ".venv/bin/python").write_text(WITHOUT_PIP)
    (checkout.root / ".venv/theirs").touch()
    maker = tmp_path / "my pythons" / "python3"
    maker.parent.mkdir()
    maker.write_text(MAKES_NONE)
    maker.chmod(0o755)
    return {**os.environ, "PYTHON": str(maker)}


def test_an_environment_of_somebody_else_is_not_removed(checkout: Any, without_pip: dict[str, str]) -> None:
    ended = checkout.run("setup.sh", env=without_pip)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "remove it, or run .venv/bin/python -m ensurepip" in line
    assert (checkout.root / ".venv/theirs").exists()


def test_one_of_ours_that_is_broken_is_made_anew_by_the_python_that_was_named(
    checkout: Any, without_pip: dict[str, str]
) -> None:
    (checkout.root / ".venv/.sgl-importance-runtime").write_text("of an older set-up")
    ended = checkout.run("setup.sh", env=without_pip)
    assert ended.returncode == 1
    assert f"{without_pip['PYTHON']} cannot make a virtual environment" in ended.stderr


def test_no_build_of_torch_for_cpus_is_one_line_and_never_a_build_for_cuda(checkout: Any) -> None:
    (checkout.root / "broken").write_text("+cpu")
    ended = checkout.run("setup.sh", env={**os.environ, "TARGET": "cpu"})
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "PIP_EXTRA_INDEX_URL" in line
    asked = installs(checkout)
    assert asked
    assert all("+cpu" in each for each in asked)


@pytest.fixture
def cuda(tmp_path: Path) -> Any:
    """The environment of a machine with a driver of the given version and, unless told otherwise, nvcc."""

    def env(driver: str = "580.65.06", *, nvcc: bool = True) -> dict[str, str]:
        folder = tmp_path / "cuda" / "bin"
        folder.mkdir(parents=True, exist_ok=True)
        programs = {"nvidia-smi": f"echo {driver}", **({"nvcc": "true"} if nvcc else {})}
        for name, line in programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{line}\n")
            (folder / name).chmod(0o755)
        others = [
            part for part in os.environ["PATH"].split(":") if not shutil.which("nvcc", path=part) or nvcc
        ]
        return {
            **os.environ,
            "TARGET": "cuda",
            "PATH": ":".join([str(folder), *others]),
            "CUDA_HOME": str(tmp_path / "none"),
        }

    return env


@pytest.mark.parametrize(
    ("machine", "cure"),
    [({"driver": "570.86.10"}, "update the driver"), ({"nvcc": False}, "install the CUDA toolkit 13")],
)
def test_a_machine_that_cannot_start_sglang_on_its_gpu_is_one_line_before_anything_is_fetched(
    checkout: Any, cuda: Any, machine: dict[str, Any], cure: str
) -> None:
    ended = checkout.run("setup.sh", env=cuda(**machine))
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert cure in line
    assert installs(checkout) == []
    assert checkout.run("setup.sh", env=cuda()).returncode == 0


def test_dependencies_for_cuda_that_cannot_be_fetched_are_one_line_with_the_cure(
    checkout: Any, cuda: Any
) -> None:
    (checkout.root / "broken").write_text("sglang==")
    ended = checkout.run("setup.sh", env=cuda())
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "PIP_EXTRA_INDEX_URL" in line
    assert "cuda-tile" in line


@pytest.mark.parametrize("name", ["scripts/pins-cpu.txt", *PROJECTS])
def test_changed_pins_are_installed(checkout: Any, name: str) -> None:
    checkout.run("setup.sh")
    calls(checkout)
    with (checkout.root / name).open("a") as file:
        file.write("# changed\n")
    assert checkout.run("setup.sh").returncode == 0
    assert installs(checkout)


def test_the_test_extras_come_on_top_and_stay(checkout: Any) -> None:
    checkout.run("setup.sh")
    assert not any("[test]" in line for line in installs(checkout))
    checkout.run("setup.sh", "--with-tests")
    assert any("[test]" in line for line in installs(checkout))
    checkout.run("setup.sh")
    assert calls(checkout) == []


def test_two_at_once_install_once(checkout: Any) -> None:
    env = {**os.environ, "TARGET": "cpu"}
    command = checkout.command("setup.sh")
    both = [subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert sum("sglang==" in line for line in installs(checkout)) == 1


def test_no_python_is_one_line_with_the_cure(checkout: Any, tmp_path: Path) -> None:
    """With a search path that holds the tools of the script but no Python."""
    shutil.rmtree(checkout.root / ".venv")
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "cat", "cut", "dirname", "flock", "grep", "mkdir", "sha256sum"):
        found = shutil.which(tool)
        assert found, tool
        (tools / tool).symlink_to(found)
    ended = checkout.run("setup.sh", env={"PATH": str(tools)})
    assert ended.returncode != 0
    assert len(ended.stderr.splitlines()) == 1
    assert "Python 3.11" in ended.stderr
    assert "PYTHON=" in ended.stderr


def test_unknown_arguments_are_refused(checkout: Any) -> None:
    ended = checkout.run("setup.sh", "--with-test")
    assert ended.returncode == 2
    assert "--with-tests" in ended.stderr
    assert calls(checkout) == []


def test_a_browser_is_installed_only_where_it_is_asked_for(checkout: Any, tmp_path: Path) -> None:
    chromium = tmp_path / "chromium"
    chromium.write_text("#!/bin/sh\n")
    chromium.chmod(0o755)
    assert checkout.run("setup.sh", "--with-tests").returncode == 0
    assert not any("playwright" in line for line in installs(checkout))
    ended = checkout.run("setup.sh", "--with-browser", env={"CHROMIUM": str(chromium)})
    assert ended.returncode == 0, ended.stderr
    assert f"Chromium: {chromium}" in ended.stdout
    (installed,) = installs(checkout)
    assert "playwright" in installed
