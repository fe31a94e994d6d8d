"""Serves one model on several servers of this machine that share a store and a ledger, and watches over them.

    python scripts/fleet.py                     two servers on 127.0.0.1:30000 and 30001, over one directory
    python scripts/fleet.py --store mooncake    over Mooncake: a master and two store nodes, by TCP
    python scripts/fleet.py --ledger postgresql://user@host/database --servers 3 -- --model-path <model>

Flags behind -- go to every server, with the defaults of scripts/serve.sh. What ends is started again.
Mooncake needs libibverbs1 and mooncake-transfer-engine; without CUDA, mooncake-transfer-engine-non-cuda.
--dry-run prints the commands: on several machines, run these with the addresses of the machines.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
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

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
START_SECONDS = 300.0
LOOK_SECONDS = 1.0
RESTART_SECONDS = 5.0
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

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.is_healthy():
            assert self.running is not None
            if (code := self.running.poll()) is not None:
                raise FleetError(f"{self.name} ended with {code}: {self._last_words()}")
            if time.monotonic() > deadline:
                raise FleetError(
                    f"{self.name} is not ready after {START_SECONDS:.0f} s: look into {self.log}"
                )
            time.sleep(0.2)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends it with everything that it started."""
        if self.running is None:
            return
        self._signal(how)
        with suppress(subprocess.TimeoutExpired):
            self.running.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL)
        self.running.wait()
        self.running = None

    def _signal(self, how: signal.Signals) -> None:
        assert self.running is not None
        with suppress(ProcessLookupError):
            os.killpg(self.running.pid, how)

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        words = lines[-1] if lines else "it said nothing"
        if "libibverbs" in words:
            return f"{words}: install libibverbs1, such as by apt-get install libibverbs1"
        return f"{words} (all of it: {self.log})"


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


def master(folder: Path, *, port: int = MASTER_PORT, http_port: int = MASTER_HTTP_PORT) -> Process:
    """Knows which node holds which page, and evicts by its own LRU."""
    command = [
        *(mooncake_program("mooncake_master"), f"--rpc_port={port}", f"--rpc_address={HOST}"),
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
    master_port: int = MASTER_PORT,
    port: int = NODE_PORT,
    http_port: int = NODE_HTTP_PORT,
) -> Process:
    """Lends memory to the store."""
    command = [
        *(mooncake_program("mooncake_client"), f"--host={HOST}", f"--port={port + number}"),
        *(
            "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address={HOST}:{master_port}",
            "--protocol=tcp",
        ),
        *(f"--global_segment_size={megabytes}MB", "--enable_http_server=true"),
        f"--http_port={http_port + number}",
    ]
    health = f"http://{HOST}:{http_port + number}/health"
    return Process(f"mooncake-node-{number}", command, health, folder)


def mooncake_flags(master_port: int = MASTER_PORT) -> list[str]:
    """Of a server that stores its pages there, under our checks, and lends no memory itself."""
    settings = {
        "master_server_address": f"{HOST}:{master_port}",
        "metadata_server": "P2PHANDSHAKE",
        "local_hostname": HOST,
        "protocol": "tcp",
        "global_segment_size": 0,
        "prefetch_threshold": 16,
    }
    return [
        *("--hicache-storage-backend", "mooncake", "--kv-importance-store-backends", "any"),
        *("--hicache-storage-backend-extra-config", json.dumps(settings)),
    ]


def server(folder: Path, number: int, port: int, flags: Sequence[str]) -> Process:
    """A server with the defaults of ``scripts/serve.sh``."""
    words = subprocess.run(
        ["bash", ROOT / "scripts" / "serve.sh", "--port", str(port), *flags],
        env={**os.environ, "SERVE_DRY_RUN": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if words.returncode:
        raise FleetError(words.stderr.strip().splitlines()[-1])
    command = [sys.executable, *words.stdout.splitlines()[1:]]
    return Process(f"server-{number}", command, f"http://{HOST}:{port}/health", folder)


def members(options: argparse.Namespace, flags: Sequence[str]) -> list[Process]:
    """Every program of the fleet, in the order in which they start."""
    folder: Path = options.folder
    wanted = [*flags, "--kv-importance-ledger", options.ledger or str(folder / "ledger")]
    first: list[Process] = []
    if options.store == "mooncake":
        first = [master(folder)]
        first += [
            store_node(folder, each, megabytes=options.store_megabytes) for each in range(options.nodes)
        ]
        # What fails a check is set aside in a directory of each server's own.
        stores = [folder / f"set-aside-{number}" for number in range(options.servers)]
        wanted += mooncake_flags()
    else:
        stores = [Path(options.store or folder / "store")] * options.servers
    return first + [
        server(folder, number, options.port + number, [*wanted, "--kv-importance-store", str(store)])
        for number, store in enumerate(stores)
    ]


def watch(fleet: Sequence[Process]) -> None:
    """Starts again what ends, and says so, until Ctrl-C."""
    ended: dict[str, float] = {}
    while True:
        time.sleep(LOOK_SECONDS)
        for each in fleet:
            if each.running is not None and (code := each.running.poll()) is not None:
                print(f"{each.name} ended with {code}: it is started again ({each.log})", flush=True)
                each.stop(signal.SIGKILL)  # what it had started
                ended[each.name] = time.monotonic() + RESTART_SECONDS
            if each.running is None and time.monotonic() > ended[each.name]:
                each.start()


def main() -> None:
    own, behind = sys.argv[1:], []
    if "--" in own:
        own, behind = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--servers", type=int, default=2, help="servers (default: 2)")
    add("--port", type=int, default=30000, help="of the first; the next follow (default: 30000)")
    add("--store", default="", help="mooncake, or a directory that all servers share")
    add("--nodes", type=int, default=2, help="store nodes of Mooncake (default: 2)")
    add("--store-megabytes", type=int, default=512, help="memory of each store node (default: 512)")
    add("--ledger", default="", help="directory or postgresql://user@host/database")
    add("--folder", type=Path, default=ROOT / ".cache" / "fleet", help="of logs, and of what is not named")
    add("--dry-run", action="store_true", help="print the commands and start nothing")
    options = parser.parse_args(own)
    try:
        run(options, behind)
    except FleetError as error:
        sys.exit(f"fleet.py: {error}")


def run(options: argparse.Namespace, flags: Sequence[str]) -> None:
    """Starts the fleet and watches over it; ends all of it with itself."""
    fleet = members(options, flags)
    if options.dry_run:
        for each in fleet:
            print(shlex.join(each.command))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    urls = [each.health.removesuffix("/health") for each in fleet if each.name.startswith("server-")]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for each in fleet:
            if each.is_healthy():
                raise FleetError(
                    f"something answers at {each.health} already: stop it, or choose another --port"
                )
        for each in fleet:
            each.start()
            if not each.name.startswith("server-"):
                each.wait_ready()  # servers need it
        for each in fleet:
            each.wait_ready()
        print(f"{len(fleet)} processes are ready, logs in {options.folder}")
        print(f"look at it: sgl-importance fleet {' '.join(urls)}", flush=True)
        watch(fleet)
    except KeyboardInterrupt:
        pass
    finally:
        for each in reversed(fleet):
            each.stop()


if __name__ == "__main__":
    main()
