"""Processes on one directory: who is there, and who was lost."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sgl_importance.storage.presence import LOST_MARK_SECONDS, Presence
from sgl_importance.storage.store_counters import StoreCounters


def use(directory: Path, ready: Any, leave: Any) -> None:
    presence = Presence(directory, StoreCounters())
    presence.look()
    ready.set()
    leave.wait(30)
    presence.leave()


class Neighbour:
    def __init__(self, path: Path, does: Callable[[Path, Any, Any], None] = use) -> None:
        context = multiprocessing.get_context("fork")
        ready, self._leave = context.Event(), context.Event()
        self.process = context.Process(target=does, args=(path, ready, self._leave))
        self.process.start()
        assert ready.wait(30)

    def end(self, *, kill: bool) -> None:
        if kill:
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGKILL)
        else:
            self._leave.set()
        self.process.join(30)


@pytest.mark.parametrize("kill", [False, True])
def test_a_killed_process_is_counted_once_and_one_that_leaves_is_not(tmp_path: Path, kill: bool) -> None:
    counters, others = StoreCounters(), StoreCounters()
    presence, other = Presence(tmp_path, counters), Presence(tmp_path, others)
    presence.look()
    assert counters["neighbours"] == 0
    neighbour = Neighbour(tmp_path)
    presence.look()
    presence.look()
    assert (counters["neighbours"], counters["lost_neighbours"]) == (1, 0)
    neighbour.end(kill=kill)
    presence.look()
    presence.look()
    assert (counters["neighbours"], counters["lost_neighbours"]) == (1, int(kill))
    presence.leave()
    other.look()  # comes later, as a restarted server does
    assert others["lost_neighbours"] == int(kill)
    other.leave()


def hold(mark: Path, ready: Any, leave: Any) -> None:
    """As a process does that looks at the mark and is stopped meanwhile."""
    with mark.open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ready.set()
        leave.wait(30)


def test_a_lost_process_is_no_neighbour_while_another_looks_at_it(tmp_path: Path) -> None:
    Neighbour(tmp_path).end(kill=True)
    (mark,) = (tmp_path / "processes").iterdir()
    looker = Neighbour(mark, hold)
    counters = StoreCounters()
    presence = Presence(tmp_path, counters)
    presence.look()
    looker.end(kill=False)
    presence.look()
    assert (counters["neighbours"], counters["lost_neighbours"]) == (0, 1)
    presence.leave()


def make_older(mark: Path) -> None:
    long_ago = mark.stat().st_mtime - LOST_MARK_SECONDS - 1
    os.utime(mark, (long_ago, long_ago))


def test_the_mark_of_a_lost_process_goes_in_the_end(tmp_path: Path) -> None:
    Neighbour(tmp_path).end(kill=True)
    (mark,) = (tmp_path / "processes").iterdir()
    first, later = StoreCounters(), StoreCounters()
    for counters in (first, later):
        presence = Presence(tmp_path, counters)
        presence.look()
        assert mark.exists() == (counters is first)
        presence.leave()
        if mark.exists():
            make_older(mark)
    assert (first["lost_neighbours"], later["lost_neighbours"]) == (1, 0), (
        "that one comes too late to hear of it"
    )
    assert list((tmp_path / "processes").iterdir()) == []


def test_every_process_learns_that_one_which_ran_for_long_was_lost(tmp_path: Path) -> None:
    neighbour = Neighbour(tmp_path)
    (mark,) = (tmp_path / "processes").iterdir()
    make_older(mark)
    neighbour.end(kill=True)
    for _ in range(2):
        counters = StoreCounters()
        other = Presence(tmp_path, counters)
        other.look()
        assert counters["lost_neighbours"] == 1
        other.leave()


def test_a_mark_that_cannot_be_opened_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour = Neighbour(tmp_path)
    (tmp_path / "processes" / "0.process").mkdir()  # stands for the file of another user
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: sorted(listed(folder)))
    counters = StoreCounters()
    presence = Presence(tmp_path, counters)
    presence.look()
    assert counters["neighbours"] == 1
    presence.leave()
    neighbour.end(kill=False)


def test_a_removed_directory_is_entered_again_and_one_that_cannot_be_written_does_no_harm(
    tmp_path: Path,
) -> None:
    counters = StoreCounters()
    presence = Presence(tmp_path / "store", counters)
    presence.look()
    shutil.rmtree(tmp_path / "store")
    presence.look()
    neighbour = Neighbour(tmp_path / "store")
    presence.look()
    assert counters["neighbours"] == 1
    neighbour.end(kill=True)
    presence.leave()
    (tmp_path / "file").touch()
    Presence(tmp_path / "file", counters).look()


@pytest.mark.parametrize("at", ["exists", "mkdir", "rename"])
def test_who_leaves_while_another_thread_looks_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The storage threads look at leisure; the server that closes does not wait for them."""
    presence = Presence(tmp_path, StoreCounters())
    if at == "exists":
        presence.look()
    owner = os if at == "rename" else Path
    original = getattr(owner, at)

    def leave_meanwhile(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, at, original)
        presence.leave()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, at, leave_meanwhile)
    presence.look()
    assert list((tmp_path / "processes").iterdir()) == []
    presence.leave()
