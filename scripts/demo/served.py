"""The demonstration's server: ``scripts/serve.sh`` on a free port, which ends when we end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 900.0  # says only when it hangs: what ends is noticed at once
STOP_SECONDS = 20.0
PR_SET_PDEATHSIG = 1
WITHOUT_HOST_TIER = "enable-hierarchical-cache: false\n"
"""What is hit is then hit on the device, which is all that the shadow of stock knows."""
OWN_FLAGS = ("--config", "--host", "--kv-importance-trace", "--served-model-name")
"""By which the server is found and its recording read: another value would be waited for in vain."""


class NotServed(Exception):
    """The server cannot be had; the message names the cure."""


class Server:
    """Ready when the context is entered; ended, with every process of it, when it is left.

    Args:
        flags: of ``scripts/serve.sh`` but for ``OWN_FLAGS``; those that follow later win.
        port: a free one where none is named.

    Attributes:
        recording: folder of ``--kv-importance-trace``.
    """

    def __init__(self, *flags: str, port: int | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="demo-")
        folder = Path(self._folder.name)
        self.recording = folder / "recording"
        self._log = folder / "server.log"
        config = folder / "server.yaml"
        config.write_text(WITHOUT_HOST_TIER)
        self._name = f"demo-{uuid.uuid4().hex[:8]}"  # tells it from another server on the same port
        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._client = httpx.Client(base_url=self.url, timeout=START_SECONDS, trust_env=False)
        self.command = [
            *("bash", str(ROOT / "scripts/serve.sh"), "--port", str(port), "--config", str(config)),
            *("--kv-importance-trace", str(self.recording), "--served-model-name", self._name, *flags),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        # Our signals come as KeyboardInterrupt: between these lines one finds a process that is known.
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_ends_with_parent,
                )
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._folder.cleanup()

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise NotServed(f"the server ended while it started; its last words:\n{self._last_words()}")
            with contextlib.suppress(httpx.TransportError):
                # The first pass compiles what later ones would wait for.
                if self._client.get("/health_generate").status_code == 200:
                    served = self.get("/v1/models")["data"][0]["id"]
                    if served != self._name:
                        raise NotServed(f"another server, '{served}', has taken {self.url}: run it again")
                    return
            time.sleep(0.3)
        raise NotServed(
            f"the server was not ready after {START_SECONDS:.0f} s: run it on a quieter machine. Its last "
            f"words:\n{self._last_words()}"
        )

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-12:])

    def stop(self) -> None:
        """Ends it as an operator does; what does not end in time is killed, and what it left behind."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    # ---- requests ----

    def get(self, path: str, **params: Any) -> Any:
        return self._client.get(path, params=params).raise_for_status().json()

    def post(self, path: str, **body: Any) -> Any:
        try:
            answer = self._client.post(path, json={"model": self._name, **body})
            return answer.raise_for_status().json()
        except httpx.HTTPError as error:
            raise NotServed(
                f"{path} failed ({error}); the server's last words:\n{self._last_words()}"
            ) from error


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _ends_with_parent() -> None:
    """In the child: SIGTERM when we are killed, over ``exec`` and all."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
