"""Shared by all tests: where helpers are found, and the checkpoint that servers serve."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Times say nothing on a shared machine, and the first example of a test may compile.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def probe_model() -> Path:
    """Folder of the embedded retrieval model."""
    from sgl_importance.probe import checkpoint_path

    return checkpoint_path()
