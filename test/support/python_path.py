"""Environments in which processes find what lies in folders of the tests."""

from __future__ import annotations

import os
from pathlib import Path

TEST = Path(__file__).parents[1]
FAULTS = Path(__file__).parent / "faults"
CHECKS = Path(__file__).parent / "checks"


def python_path(*folders: Path | str) -> dict[str, str]:
    """The variable PYTHONPATH, with the folders in front of what it holds already."""
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), *([inherited] if inherited else [])])}
