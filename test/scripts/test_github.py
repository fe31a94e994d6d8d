"""The project's workflows and templates: valid by GitHub's schemas, and made of commands that exist here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("vendor.github-issue-forms", sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml"))),
    ],
)
def test_they_are_valid(schema: str, files: list[Path]) -> None:
    assert files
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_workflows_run_the_scripts_that_people_run() -> None:
    said = "\n".join(file.read_text() for file in WORKFLOWS)
    scripts = set(re.findall(r"scripts/[\w.-]+\.(?:sh|py)", said))
    assert {"scripts/setup.sh", "scripts/test.sh", "scripts/docs.sh", "scripts/nightly.sh"} <= scripts
    assert not [script for script in scripts if not (ROOT / script).is_file()]
