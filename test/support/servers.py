"""A real sglang server for tests: on a free port, with its own log and store, ended with its whole family."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from typing import Any

import httpx
import psutil

from support import warm_start
from support.processes import command_line, session_members
from support.warm_start import SERVER_ENV

START_SECONDS = 240.0
STOP_SECONDS = 20.0
SHUT_DOWN_SECONDS = 60.0
REQUEST_SECONDS = 300.0
ENDING_SECONDS = 2.0  # of a server that has dropped a connection
PORT_TAKEN = "EADDRINUSE"
FAULT_SERIES = ("sglang:kv_importance_faults_total", "sglang:kv_importance_store_thread_faults_total")
FAULT_LINES = re.compile(r"KV importance: fault in \w+|KV importance store: \w+ thread: .*")


PORTS = range(20_000, 29_000)
"""Below those that Linux gives to connections: a server binds its port many seconds after it was chosen.

Nor those that scripts are tried with, 30000 by default, which look whether somebody listens there.
"""


def free_port() -> int:
    # Not the module's generator, which tests seed: two processes would choose the same.
    for port in SystemRandom().sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"100 ports of {PORTS} are in use")


def _clears_up(process: psutil.Process) -> bool:
    """Whether this is Python's resource tracker: it ends behind the others, and removes what they shared."""
    return any("resource_tracker" in word for word in command_line(process))


class ServerFailed(RuntimeError):
    """The server ended, or did not become ready; the message ends with its log."""


class _ServerLogTransport(httpx.HTTPTransport):
    """Where the server has ended, a request fails with what it logged, not with a connection reset."""

    def __init__(self, server: ServerProcess) -> None:
        # Below the 5 s after which a server closes an idle connection: a request could cross its closing.
        super().__init__(limits=httpx.Limits(keepalive_expiry=2))
        self._server = server

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return super().handle_request(request)
        except httpx.ConnectError:  # as while it starts
            self._server.raise_if_ended()
            raise
        except httpx.TransportError as error:
            self._server.raise_if_ended(ENDING_SECONDS)
            error.add_note(f"the server runs on; it has logged:\n{self._server.log_tail()}")
            raise


class ServerProcess:
    """``python -m sglang.launch_server`` with the given flags, ready when the context is entered.

    Args:
        flags: flags of the server, as on a command line; port, host and device are set here.
        model: folder of the checkpoint.
        store: folder of the HiCache file tier; a fresh one where None. Pass one to share it between servers.
        env: variables added to the environment.
        imports_anew: every process is a new interpreter (``warm_start``).
        api_key: key that the server demands, and that our own requests carry.
        nccl_port: whether the port of its collectives is chosen here. Replicas choose one each, of those that
            Linux gives to connections, long before they bind it: such a server may have to start twice.

    Attributes:
        expects_faults: set by a test that makes the server's own work fail; else ``stop`` demands none.
    """

    def __init__(
        self,
        *flags: str,
        model: Path,
        store: Path | None = None,
        env: Mapping[str, str] | None = None,
        imports_anew: bool = False,
        api_key: str | None = None,
        nccl_port: bool = True,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sglang-"))
        # Not at exit from the context: what a server has logged is looked at after its end.
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.log_file = self.folder / "server.log"
        self.store = store or self.folder / "store"
        self.store.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        # Tells our server from one that somebody left on the same port.
        self.name = f"test-{uuid.uuid4().hex}"
        self.command: Sequence[str] = [
            sys.executable,
            "-m",
            "sglang.launch_server",
            *("--model-path", str(model), "--served-model-name", self.name),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *(("--nccl-port", str(free_port())) if nccl_port else ()),
            *("--device", "cpu", "--dtype", "float32", "--sleep-on-idle"),
            *("--enable-metrics", "--enable-cache-report"),
            *(("--api-key", api_key) if api_key else ()),
            *flags,
        ]
        self.expects_faults = False
        self._imports_anew = imports_anew
        self._may_start_again = not nccl_port
        (self.folder / "tmp").mkdir()
        self._env = {
            **os.environ,
            **SERVER_ENV,
            "TMPDIR": str(self.folder / "tmp"),
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.store),
            **(env or {}),
        }
        self._process: warm_start.Process | None = None
        self._api_key = api_key
        self._client = httpx.Client(
            base_url=self.base_url,
            timeout=REQUEST_SECONDS,
            transport=_ServerLogTransport(self),
            trust_env=False,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        )

    # ---- life ----

    def __enter__(self) -> ServerProcess:
        self.spawn()
        try:
            self.wait_ready()
        except ServerFailed:
            port_was_taken = PORT_TAKEN in self.log()
            self._end()
            if not (port_was_taken and self._may_start_again):
                raise
            self._may_start_again = False
            return self.__enter__()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:  # the test has failed already
            self._end()

    def spawn(self) -> None:
        """Starts the process without waiting for it."""
        self._process = warm_start.start(
            self.command,
            env=self._env,
            folder=self.folder,
            stderr=self.log_file,
            imports_anew=self._imports_anew,
        )

    @property
    def pid(self) -> int:
        """Of the launcher, the ancestor of all processes of the server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self.raise_if_ended()
            try:
                if self._client.get("/health_generate", timeout=30).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.3)
        else:
            raise ServerFailed(f"not ready after {START_SECONDS:.0f} s\n{self.log_tail()}")
        served = self._client.get("/v1/models").json()["data"][0]["id"]
        assert served == self.name, f"another server answers on port {self.port}: {served}"

    def raise_if_ended(self, within: float = 0.0) -> None:
        """ServerFailed, with the log, where the process has ended or does within some seconds."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(within)
            raise ServerFailed(f"the server ended with {code}\n{self.log_tail()}") from None

    def shut_down(self) -> int:
        """Ends the server as an operator does, by SIGTERM to the launcher; its exit code."""
        os.kill(self.pid, signal.SIGTERM)
        assert self._process is not None
        code = self._process.wait(SHUT_DOWN_SECONDS)
        self.stop()
        return code

    def kill_launcher(self) -> None:
        """SIGKILL to the launcher; its children end by themselves."""
        os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        """Ends the server and every process that it started, without leave.

        Raises:
            AssertionError: something of ours has failed in it, though it went on serving. A server that does
                not answer any more has its log only to say so.
        """
        if self._process is None:
            return
        counted = self._counted_faults()
        self._end()
        if not self.expects_faults:
            faults = [*counted, *FAULT_LINES.findall(self.log())]
            assert not faults, "\n".join(["faults of ours:", *faults, self.log()])

    def _counted_faults(self) -> list[str]:
        """Every series of faults that is not 0; none where the server is dead, or exports none of ours."""
        try:
            series = self._series(STOP_SECONDS)
        except (httpx.HTTPError, ServerFailed):
            return []
        return [
            f"{name} {value:g}" for name, value in series.items() if value and name.startswith(FAULT_SERIES)
        ]

    def _end(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + STOP_SECONDS
        while members := [each for each in session_members(self.pid) if not _clears_up(each)]:
            assert time.monotonic() < deadline, f"does not end: {members}"
            for member in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            time.sleep(0.02)  # until they run no more: that somebody has buried them may take seconds
        self._process.wait(STOP_SECONDS)
        self._process = None

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        """Its last lines; of a server that several processes brought down, the first traceback too."""
        log = self.log().splitlines()
        first = next((row for row, line in enumerate(log) if "Traceback (most recent" in line), len(log))
        cause = log[first : min(first + lines, len(log) - lines)]
        return "\n".join([*cause, *(["..."] if cause else []), *log[-lines:]])

    # ---- requests ----

    def generate(
        self, prompt: str | Sequence[int], *, max_new_tokens: int = 8, **sampling: Any
    ) -> dict[str, Any]:
        """Greedy generation through ``/generate``: ``output_ids``, ``text`` and ``meta_info``."""
        body: dict[str, Any] = {
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, **sampling}
        }
        body["text" if isinstance(prompt, str) else "input_ids"] = (
            prompt if isinstance(prompt, str) else list(prompt)
        )
        return self.post("/generate", body)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int = 16, **extra: Any
    ) -> dict[str, Any]:
        """Greedy chat completion; the whole answer."""
        return self.post(
            "/v1/chat/completions",
            {
                "model": self.name,
                "messages": list(messages),
                "temperature": 0,
                "max_tokens": max_tokens,
                **extra,
            },
        )

    def get(self, path: str, **params: Any) -> Any:
        return self._client.get(path, params=params).raise_for_status().json()

    def post(self, path: str, body: Any = None) -> Any:
        """The answer's JSON; None where it is empty."""
        answer = self._client.post(path, json=body).raise_for_status()
        return answer.json() if answer.content else None

    def flush_cache(self) -> None:
        """Waits for the step behind the last answer, which may still run: only idle servers are flushed."""
        self._client.post("/flush_cache", params={"timeout": 30}).raise_for_status()

    def memory(self) -> int:
        """Bytes that its processes hold, as far as they are their own."""
        return sum(member.memory_info().rss for member in session_members(self.pid))

    def metrics(self) -> dict[str, float]:
        """Every series that the server exports, by its name and labels as written."""
        return self._series(REQUEST_SECONDS)

    def _series(self, seconds: float) -> dict[str, float]:
        # A scheduler counts a request behind its answer: it replies to this when that is done.
        self._client.get("/server_info", timeout=seconds).raise_for_status()
        text = self._client.get("/metrics", timeout=seconds).raise_for_status().text
        rows = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {series: float(value) for series, _, value in rows}

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the series of a name that carry the given labels; KeyError where there is none."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        values = [
            value
            for series, value in self.metrics().items()
            if series.partition("{")[0] == name and all(label in series for label in wanted)
        ]
        if not values:
            raise KeyError(f"{name} {labels}")
        return sum(values)

    def openai_client(self) -> Any:
        from openai import OpenAI

        return OpenAI(
            base_url=f"{self.base_url}/v1", api_key=self._api_key or "none", timeout=REQUEST_SECONDS
        )
