"""Shared by all tests, the laboratory's too: the checkpoint that servers serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from support import warm_start
from support.browser import NoBrowser, open_browser
from support.postgres import Postgres, postgres_server, programs
from support.tested_rows import name_rows

# Times say nothing on a shared machine, and the first example of a test may compile.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

warm_start.is_on = True


@pytest.fixture(scope="session")
def probe_model() -> Path:
    """Folder of the embedded retrieval model."""
    from sgl_importance.embedded_model import checkpoint_path

    return checkpoint_path()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium; where there is none, its tests are skipped."""
    try:
        with open_browser() as browser:
            yield browser
    except NoBrowser as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL whose password libpq finds in the environment, as that of an operator."""
    if programs() is None:
        pytest.skip("PostgreSQL is not installed: no initdb on the PATH or below /usr/lib/postgresql")
    with postgres_server() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PGPASSWORD", server.password)
        yield server


# Without a server, and among the longest: begun last, one would run alone at the end.
_LONG = (
    "test/kernels/test_flashinfer_compiles.py",
    "test/kernels/test_interpreter.py",
    "test/kernels/test_kernel_benchmark.py",
    "test/scripts/test_release.py",
    "test/tree/test_faults.py",
    "test/tree/test_soak.py",
)

# Folders whose modules share one server or its answers; elsewhere a module needs nothing of another.
_TOGETHER = ("abuse/http", "equality", "serve", "storage")


def _group(module: str) -> str:
    """What one of several workers runs alone: a module, or such a folder."""
    return next((folder for folder in _TOGETHER if module.startswith(f"test/{folder}/")), module)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Instead of ``loadfile``. (``loadgroup`` marks node ids in a way that pytest 9.2 does not read.)"""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class LoadGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid.split("::")[0])

    return LoadGroups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Among several workers, what takes long goes first: the rest fills the gaps at the end."""
    name_rows(items)
    if not hasattr(config, "workerinput"):
        return
    groups = {item: _group(item.nodeid.split("::")[0]) for item in items}
    slow = {groups[item] for item in items if item.get_closest_marker("server") is not None}.union(_LONG)
    items.sort(key=lambda item: groups[item] not in slow)
