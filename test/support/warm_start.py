"""Programs without the ten seconds of CPU time that each of their processes takes to import sglang.

Python's own fork server imports sglang once, and a program (a server's launcher, or a script) is forked from
it. What the program starts in turn (upstream spawns its schedulers) becomes one of its spares: children that
were forked before the program did anything, and that wait. A spare goes on where ``exec`` would: with the
arguments, the environment and the open files that were meant for a new interpreter, and nothing that the
program has done.

So upstream's launch runs unchanged, in processes that differ from new ones in what is imported already. A
program finds its own PYTHONPATH, and with it plugins of sglang, which sglang looks for when it launches, not
when it is imported. Most of sglang's variables are read when they are needed, too. What is read while sglang
is imported (``SERVER_ENV``, plugins of a platform) is as it was when the fork server began: a test that sets
such a thing starts its program for real: among others a server with a policy (test/attention). So does
``sglang serve`` in test/plugin, as a user types it.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any, BinaryIO, Union
from unittest.mock import patch

IMPORTED = [
    "support.without_gc",
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",  # brings every model
    # Ours that numba has compiled, and with them numba: its registries take a second to fill.
    "sgl_importance.reuse.hazards",
    "sgl_importance_kernels.compiled",
    "sgl_importance_kernels.sparse.layer_pages",
    # What our plugin imports in a server; nothing is hooked before sglang calls it.
    "sglang_importance.http.answer_reports",
    "sglang_importance.http.routes",
    "sglang_importance.attention.torch_native",
    "sglang_importance.sparse.install",
    "sglang_importance.storage.backend",
]
SERVER_ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""Of every server; both are read while sglang is imported."""
SPARES = 4  # two launches, each a scheduler and a detokenizer; what is started beyond is a new interpreter
ASIDE = 512  # file numbers from here on are nobody's

is_on = False
"""Whether programs start warm where nothing speaks against it: in tests. Benchmarks measure real starts."""


Process = Union[subprocess.Popen[bytes], "WarmProcess"]


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    folder: Path,
    stderr: Path,
    stdout: Path | None = None,
    imports_anew: bool = False,
) -> Process:
    """Starts ``python`` with a module or a script, in a session of its own, so that its family can be ended.

    Args:
        command: as for ``subprocess.Popen``: python, ``-m`` and a module, or a script, and arguments.
        env: the whole environment.
        folder: where it runs.
        stderr: the file that takes what it writes there.
        stdout: the same; None is where stderr goes.
        imports_anew: it is a new interpreter in any case.
    """
    if is_on and not imports_anew:
        return WarmProcess(command, env=env, folder=folder, stderr=stderr, stdout=stdout)
    with _emptied(stderr) as errors, _emptied(stdout or stderr) as output:
        return subprocess.Popen(
            command, stdout=output, stderr=errors, env=env, cwd=folder, start_new_session=True
        )


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    folder: Path,
    limit: float,
    imports_anew: bool = False,
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` with captured text; the arguments are those of ``start``.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``limit`` seconds, and was ended with its family.
    """
    with tempfile.TemporaryDirectory() as logs:
        stdout, stderr = Path(logs) / "stdout", Path(logs) / "stderr"
        process = start(
            command, env=env, folder=folder, stderr=stderr, stdout=stdout, imports_anew=imports_anew
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        return subprocess.CompletedProcess(command, code, stdout.read_text(), stderr.read_text())


def _emptied(path: Path) -> BinaryIO:
    """An empty file to append to, as another stream may."""
    path.open("wb").close()
    return path.open("ab")


class WarmProcess:
    """What tests use of ``subprocess.Popen``; the arguments are those of ``start``."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        folder: Path,
        stderr: Path,
        stdout: Path | None = None,
    ) -> None:
        self._command = command
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        with patch.dict(os.environ, {**SERVER_ENV, "PYTHONPATH": _with_tests(os.environ.get("PYTHONPATH"))}):
            forkserver.ensure_running()
        self._process = context.Process(
            target=_launch, args=(command[1:], dict(env), folder, stderr, stdout or stderr)
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


def _with_tests(path: str | None) -> str:
    """A PYTHONPATH on which this package is found, too: behind everything else."""
    return os.pathsep.join(filter(None, (path, str(Path(__file__).parents[1]))))


def _launch(words: list[str], env: dict[str, str], folder: Path, stderr: Path, stdout: Path) -> None:
    """In a child of the fork server: becomes ``python words...``."""
    import setproctitle  # sglang brings it

    assert set(IMPORTED) <= sys.modules.keys(), "the fork server has not imported sglang"
    gc.freeze()  # what it has imported stays, and collections need not walk it
    gc.enable()
    os.setsid()
    # multiprocessing gives its children a stdin of another number, which a new interpreter would not inherit.
    sys.stdin = os.fdopen(0, closefd=False)
    for number, path in ((1, stdout), (2, stderr)):
        with _emptied(path) as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    tempfile.tempdir = None
    setproctitle.getproctitle()  # finds its place while the environment is where it was
    os.environ.clear()
    os.environ.update(env)
    installed = [entry for entry in sys.path if entry.startswith((sys.prefix, sys.base_prefix))]
    is_module = words[0] == "-m"
    program, *arguments = words[1:] if is_module else words
    first = "" if is_module else str(Path(program).parent)
    sys.path[:] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    sys.argv[:] = [program, *arguments]
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
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
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
