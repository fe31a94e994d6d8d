"""Where the scripts are, and how they are run: nothing here installs or starts anything real."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 60


class Scripts:
    """Runs a script of a checkout to its end; ``root`` is the checkout."""

    def __init__(self, root: Path, cwd: Path) -> None:
        self.root, self._cwd = root, cwd

    def command(self, name: str, *arguments: str) -> list[str]:
        return ["bash", str(self.root / "scripts" / name), *arguments]

    def run(
        self, name: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(name, *arguments),
            env={**os.environ, "TARGET": "cpu", **(env or {})},
            cwd=self._cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    """The scripts of this checkout, called from another folder."""
    return Scripts(ROOT, tmp_path)
