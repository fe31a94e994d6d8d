"""Servers without the ten seconds of CPU time that each of their processes takes to import sglang.

Python's own fork server imports sglang once, and the launcher of a server is forked from it. What a launcher
starts in turn (upstream spawns its schedulers) becomes one of its spares: children that were forked before
the launcher did anything, and that wait. A spare goes on where ``exec`` would: with the arguments, the
environment and the open files that were meant for a new interpreter, and nothing that the launcher has done.

So upstream's launch runs unchanged, in processes that differ from new ones in what is imported already. What
is read while sglang is imported (plugins on PYTHONPATH, most variables) is as it was when the fork server
began: a test that sets such a thing starts its server for real.
"""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any
from unittest.mock import patch

IMPORTED = [
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",  # brings every model
]
SERVER_ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""Of every server; both are read while sglang is imported."""
SPARES = 2  # a scheduler and a detokenizer; what is started beyond is a new interpreter
ASIDE = 512  # file numbers from here on are nobody's

is_on = False
"""Whether servers start warm where nothing speaks against it: in tests. Benchmarks measure real starts."""


class WarmProcess:
    """``python -m module arguments...`` in a session of its own; what tests use of ``subprocess.Popen``.

    Args:
        command: as for ``subprocess.Popen``.
        env: the whole environment.
        folder: where it runs.
        log_file: takes what it writes.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], folder: Path, log_file: Path
    ) -> None:
        _, dash_m, module, *arguments = command
        assert dash_m == "-m"
        self._command = command
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        with patch.dict(os.environ, SERVER_ENV):
            forkserver.ensure_running()
        self._process = context.Process(
            target=_launch, args=(module, arguments, dict(env), str(folder), str(log_file))
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._command, timeout)
        return code


def _launch(module: str, arguments: list[str], env: dict[str, str], folder: str, log_file: str) -> None:
    """In a child of the fork server: becomes the launcher."""
    import setproctitle  # sglang brings it

    assert set(IMPORTED) <= sys.modules.keys(), "the fork server has not imported sglang"
    os.setsid()
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.chdir(folder)
    tempfile.tempdir = None
    setproctitle.getproctitle()  # finds its place while the environment is where it was
    os.environ.clear()
    os.environ.update(env)
    installed = [entry for entry in sys.path if entry.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = ["", *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    sys.argv[:] = [module, *arguments]
    # A new interpreter knows of no parent, and starts a resource tracker of its own.
    multiprocessing.process._parent_process = None
    resource_tracker._resource_tracker._fd = None
    spares = [Spare() for _ in range(SPARES)]
    start_new = util.spawnv_passfds

    def start(path: bytes, command: Sequence[Any], passed: Sequence[int]) -> int:
        if "--multiprocessing-fork" in command and spares:
            return spares.pop(0).become(command, passed)
        return start_new(path, command, passed)

    util.spawnv_passfds = start
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()


class Spare:
    """A child of this process that waits for what it shall run; it ends when this process does."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid:
            theirs.close()
            return
        self._channel.close()
        code = 1
        try:
            _run_what_comes(theirs)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def become(self, command: Sequence[Any], passed: Sequence[int]) -> int:
        """Runs ``python options... -c code arguments...`` with these open files; its process id."""
        numbers = sorted(set(passed))
        message = pickle.dumps(([*map(os.fsdecode, command)], dict(os.environ), os.getcwd(), numbers))
        with self._channel:
            socket.send_fds(self._channel, [len(message).to_bytes(8, "big")], numbers)
            self._channel.sendall(message)
        return self.pid


def _run_what_comes(channel: socket.socket) -> None:
    size, received, _, _ = socket.recv_fds(channel, 8, ASIDE)
    if not size:
        return
    with channel.makefile("rb") as file:
        command, env, folder, numbers = pickle.loads(file.read(int.from_bytes(size, "big")))
    channel.close()
    # All aside first: a number that one of them shall have may be another's now.
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD, ASIDE) for fd in received]
    for fd in received:
        os.close(fd)
    for fd, number in zip(aside, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    code = command.index("-c") + 1
    sys.argv[:] = ["-c", *command[code + 1 :]]
    exec(compile(command[code], "<string>", "exec"), {"__name__": "__main__"})
