"""A peer's process: started, waited for, and ended with its family."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

START_SECONDS = 900.0


def threads_of(threads: int) -> dict[str, str]:
    """How many threads a process computes with."""
    return {"OMP_NUM_THREADS": str(threads)}


@contextmanager
def running(words: Sequence[str], health: str, env: Mapping[str, str]) -> Iterator[tuple[Path, int]]:
    """A process that answers at ``health``, ended with its family; its log and its pid.

    Args:
        env: beside this process's own.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as stream:
            process = subprocess.Popen(
                words, env={**os.environ, **env}, stdout=stream, stderr=stream, start_new_session=True
            )
        try:
            wait(process, health, log)
            yield log, process.pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def wait(process: subprocess.Popen[bytes], health: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with {process.returncode}\n{log.read_text()[-4000:]}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(health, timeout=10).status_code == 200:
                return
        time.sleep(1)
    raise RuntimeError(f"it was not ready after {START_SECONDS:.0f} s\n{log.read_text()[-4000:]}")
