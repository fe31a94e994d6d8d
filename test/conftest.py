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


# Folders whose modules share one server or its answers; elsewhere a module needs nothing of another.
_TOGETHER = ("equality", "serve")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in this hook too
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Among several workers, what shares a server goes to one of them, and what starts servers goes first."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    tests = Path(__file__).parent
    starts_server = set[str]()
    groups: list[str] = []
    for item in items:
        module = item.path.relative_to(tests)
        folder = module.parts[0]
        groups.append(folder if folder in _TOGETHER else str(module))
        item.add_marker(pytest.mark.xdist_group(groups[-1]))
        if item.get_closest_marker("server") is not None:
            starts_server.add(groups[-1])
    if config.getoption("numprocesses"):
        order = sorted(range(len(items)), key=lambda index: groups[index] not in starts_server)
        items[:] = [items[index] for index in order]
