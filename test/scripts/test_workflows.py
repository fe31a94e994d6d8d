"""Workflows: valid by GitHub's schema, and made of the scripts that people run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def commands(workflow: Path) -> list[str]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def check(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    return subprocess.run([*command, *map(str, files)], capture_output=True, text=True, check=False)


def test_they_are_valid_and_a_wrong_key_is_seen(tmp_path: Path) -> None:
    checked = check(*WORKFLOWS)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "runs_on:"))
    assert check(wrong).returncode == 1


def test_scripts_that_they_run_are_there() -> None:
    named = [word for workflow in WORKFLOWS for command in commands(workflow) for word in command.split()]
    scripts = {word for word in named if word.startswith("scripts/")}
    assert scripts >= {"scripts/test.sh", "scripts/docs.sh", "scripts/nightly.sh"}
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


@pytest.mark.parametrize(
    "path",
    [
        ".pre-commit-config.yaml",
        *(f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "wish", "config")),
    ],
)
def test_the_other_files_can_be_read(path: str) -> None:
    assert yaml.safe_load((ROOT / path).read_text())


def test_every_part_of_the_nightly_run_has_its_job() -> None:
    from scripts.nightly import PARTS

    jobs = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())["jobs"]
    assert jobs["nightly"]["strategy"]["matrix"]["part"] == list(PARTS)
