"""Shared by all tests: where helpers are found, and the checkpoint that servers serve."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def probe_model() -> Path:
    """Folder of the embedded retrieval model."""
    from sgl_importance.probe import checkpoint_path

    return checkpoint_path()
