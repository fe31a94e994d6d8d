"""Shared by all tests, the laboratory's too: the checkpoint that servers serve."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from support import warm_start
from support.browser import NoBrowser, open_browser
from support.nightly_modules import count_kinds, is_module, mark_nightly, nightly_kind, what_is_left
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
    "test/kernels/test_interpreter.py",
    "test/kernels/test_kernel_benchmark.py",
    "test/tree/test_faults.py",
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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported here stays: looking through it again and again takes as long as some of the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Modules of the night are not even imported by day, but where they are named."""
    chosen = config.option.markexpr
    if "not nightly" not in chosen or "nightly_module" in chosen or not is_module(collection_path):
        return None
    kind = nightly_kind(collection_path.relative_to(config.rootpath).as_posix())
    if kind is None:
        return None
    config.stash[_MODULES][kind] += 1
    return True


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Among several workers, what takes long goes first: the rest fills the gaps at the end."""
    mark_nightly(items)
    name_rows(items)
    if not hasattr(config, "workerinput"):
        return
    groups = {item: _group(item.nodeid.split("::")[0]) for item in items}
    slow = {groups[item] for item in items if item.get_closest_marker("server") is not None}.union(_LONG)
    items.sort(key=lambda item: groups[item] not in slow)


_LEFT, _MODULES = pytest.StashKey[Counter[str]](), pytest.StashKey[Counter[str]]()
_CPU = pytest.StashKey[list[float]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEFT], config.stash[_MODULES], config.stash[_CPU] = Counter(), Counter(), []


def _cpu_seconds() -> float:
    """Of this process and of those that it has waited for: not of servers, which are another's children."""
    return sum(os.times()[:4])


def _own_cpu_seconds() -> float:
    return sum(os.times()[:2])


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items:
        items[0].config.stash[_LEFT].update(count_kinds(items))


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # some libraries name what is left at the end of a process
    if output := getattr(session.config, "workeroutput", None):
        stash = session.config.stash
        output["left"], output["modules"] = dict(stash[_LEFT]), dict(stash[_MODULES])
        output["cpu_seconds"] = _cpu_seconds()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    output = getattr(node, "workeroutput", {})  # a worker that has crashed has none
    if "left" in output:
        node.config.stash[_LEFT] = Counter(output["left"])  # each worker collects everything
        node.config.stash[_MODULES] = Counter(output["modules"])
        node.config.stash[_CPU].append(output["cpu_seconds"])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    of_workers = config.stash[_CPU]  # whom this process has waited for, too
    seconds = sum(of_workers, _own_cpu_seconds()) if of_workers else _cpu_seconds()
    terminalreporter.write_line(f"CPU seconds of the tests, without servers that start warm: {seconds:.0f}")
    if line := what_is_left(config.stash[_MODULES], config.stash[_LEFT]):
        terminalreporter.write_line(line)
