"""The programs of a fleet, each with its log, health and end: Mooncake's and sglang's router."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import httpx

HOST = "127.0.0.1"
START_SECONDS = 1800.0  # a large model takes its time; what ends is noticed at once
STOP_SECONDS = 20.0
MASTER_PORT, MASTER_HTTP_PORT, NODE_PORT, NODE_HTTP_PORT = 50051, 9003, 50060, 9310


class FleetError(Exception):
    """The fleet cannot be had; the message is one line with the cure."""


@dataclass
class Process:
    """One program of the fleet, with its own log.

    Attributes:
        name: of it and of its log.
        command: that starts it.
        health: address that answers 200 when it is ready.
        folder: of the log.
        env: variables beside those of this process.
    """

    name: str
    command: Sequence[str]
    health: str
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    running: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.running = subprocess.Popen(
                self.command, stdout=log, stderr=log, env={**os.environ, **self.env}, start_new_session=True
            )

    def is_healthy(self) -> bool:
        try:
            return httpx.get(self.health, timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Raises FleetError where it ends, or is not healthy within these seconds."""
        deadline = time.monotonic() + seconds
        while not self.is_healthy():
            assert self.running is not None
            if (code := self.running.poll()) is not None:
                raise FleetError(f"{self.name} ended with {code}: {self._last_words()}")
            if time.monotonic() > deadline:
                raise FleetError(
                    f"{self.name} is not ready after {seconds:g} s: look into {self.log}, or give it more by "
                    "--start-seconds"
                )
            time.sleep(0.2)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends it with everything that it started."""
        stop_all([self], how)

    def tell(self, how: signal.Signals) -> None:
        """Sends a signal to it and everything that it started."""
        assert self.running is not None
        with suppress(ProcessLookupError):
            os.killpg(self.running.pid, how)

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        words = lines[-1] if lines else "it said nothing"
        if "libibverbs" in words:
            return f"{words}: install libibverbs1, such as by apt-get install libibverbs1"
        return f"{words} (all of it: {self.log})"


def stop_all(processes: Sequence[Process], how: signal.Signals = signal.SIGTERM) -> None:
    """Ends programs with everything that they started; those that take their time take it together."""
    ended = [(each, each.running) for each in processes if each.running is not None]
    for each, _ in ended:
        each.tell(how)
    deadline = time.monotonic() + STOP_SECONDS
    for each, running in ended:
        with suppress(subprocess.TimeoutExpired):
            running.wait(max(deadline - time.monotonic(), 0))
        each.tell(signal.SIGKILL)
        running.wait()
        each.running = None


def mooncake_program(name: str) -> str:
    """The path of a program of Mooncake's package."""
    found = find_spec("mooncake")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(folder) / name
        if path.is_file():
            path.chmod(path.stat().st_mode | 0o111)  # pip leaves it without
            return str(path)
    raise FleetError(
        "--store mooncake needs Mooncake: pip install mooncake-transfer-engine, or on a machine without CUDA "
        "mooncake-transfer-engine-non-cuda"
    )


def master(
    folder: Path, *, host: str = HOST, port: int = MASTER_PORT, http_port: int = MASTER_HTTP_PORT
) -> Process:
    """Knows which node holds which page, and evicts by its own LRU."""
    command = [
        *(mooncake_program("mooncake_master"), f"--rpc_port={port}", f"--rpc_address={host}"),
        *(f"--metrics_host={HOST}", f"--metrics_port={http_port}"),
        # What a killed node held is forgotten after this, and its pages are misses.
        "--client_ttl=5",
    ]
    return Process("mooncake-master", command, f"http://{HOST}:{http_port}/metrics/summary", folder)


def store_node(
    folder: Path,
    number: int,
    *,
    megabytes: int,
    host: str = HOST,
    master_host: str = HOST,
    master_port: int = MASTER_PORT,
    port: int = NODE_PORT,
    http_port: int = NODE_HTTP_PORT,
    protocol: str = "tcp",
) -> Process:
    """Lends memory to the store; on another machine, the address by which the others reach it is ``host``."""
    command = [
        *(mooncake_program("mooncake_client"), f"--host={host}", f"--port={port + number}"),
        *(
            "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address={master_host}:{master_port}",
            f"--protocol={protocol}",
        ),
        *(f"--global_segment_size={megabytes}MB", "--enable_http_server=true"),
        f"--http_port={http_port + number}",
    ]
    health = f"http://{host}:{http_port + number}/health"
    return Process(f"mooncake-node-{number}", command, health, folder)


def router(
    folder: Path, servers: Sequence[str], *, port: int, metrics_port: int, flags: Sequence[str] = ()
) -> Process:
    """sglang's own router: it sends a prompt to the server that has had the most of its beginning.

    By itself it would look at a server once a minute, and trust one that refuses connections ten times.

    Args:
        servers: their addresses. One that is down is left out until it answers again.
        flags: of the router, behind ours.
    """
    if find_spec("sglang_router") is None:
        raise FleetError("--router needs sglang's router: pip install sglang-router")
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--host", HOST, "--port", str(port)),
        *("--prometheus-host", HOST, "--prometheus-port", str(metrics_port), "--log-level", "warn"),
        *("--policy", "cache_aware", "--health-check-interval-secs", "2", "--health-check-timeout-secs", "5"),
        *("--cb-failure-threshold", "2", "--cb-timeout-duration-secs", "5", "--cb-success-threshold", "1"),
        *("--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "5"),
        *("--worker-urls", *servers, *flags),
    ]
    return Process("router", command, f"http://{HOST}:{port}/readiness", folder)


def mooncake_flags(master_port: int = MASTER_PORT, *, host: str = HOST) -> list[str]:
    """Of a server that stores its pages there, under our checks, and lends no memory itself.

    Servers find each other's pages under one ``--served-model-name``: upstream puts it into the names.
    """
    settings = {
        "master_server_address": f"{host}:{master_port}",
        "metadata_server": "P2PHANDSHAKE",
        "local_hostname": host,
        "protocol": "tcp",
        "global_segment_size": 0,
        "prefetch_threshold": 16,
    }
    return [
        *("--hicache-storage-backend", "mooncake", "--kv-importance-store-backends", "any"),
        *("--hicache-storage-backend-extra-config", json.dumps(settings)),
    ]
