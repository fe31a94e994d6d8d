"""Serves one model on several servers of this machine that share a store and a ledger, and watches over them.

    python scripts/fleet.py                     two servers on 127.0.0.1:30000 and 30001, over one directory
    python scripts/fleet.py --store mooncake    over Mooncake: a master and two store nodes, by TCP
    python scripts/fleet.py --router 8000       behind sglang's own router on 127.0.0.1:8000
    python scripts/fleet.py --ledger postgresql://user@host/database --servers 3 -- --model-path <model>

Flags behind -- go to every server, with the defaults of scripts/serve.sh. What ends is started again.
Mooncake needs libibverbs1 and mooncake-transfer-engine; without CUDA, mooncake-transfer-engine-non-cuda.
The router needs sglang-router.
--dry-run prints the commands: on several machines, run these with the addresses of the machines.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from fleet_processes import (
    HOST,
    START_SECONDS,
    FleetError,
    Process,
    master,
    mooncake_flags,
    router,
    stop_all,
    store_node,
)

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "models"
LOOK_SECONDS = 1.0
RESTART_SECONDS = 5.0
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends the fleet: Ctrl-C, kill, and a terminal that closes."""


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
    env = {"HF_HUB_OFFLINE": "1"} if _model_of_ours(command) else {}  # as in serve.sh
    return Process(f"server-{number}", command, f"http://{HOST}:{port}/health", folder, env)


def _model_of_ours(command: Sequence[str]) -> Path | None:
    """The folder of a model that serve.sh knows by name."""
    for flag, word in pairwise(command):
        if flag == "--model-path" and Path(word).is_relative_to(ROOT):
            return Path(word)
    return None


def fetch_model(command: Sequence[str]) -> None:
    """Fetches a trained model that is asked for by name, unless it is there; its own words say why not."""
    model = _model_of_ours(command)
    if model is not None and model.parent == CACHE:
        fetched = subprocess.run([sys.executable, ROOT / "scripts" / "get_model.py", model.name], check=False)
        if fetched.returncode:
            raise FleetError(f"{model.name} could not be fetched")


def check_flags(flags: Sequence[str], *, is_mooncake: bool) -> None:
    """Refuses flags for all servers that this script sets for each: of two, the last one wins in silence."""
    cures = {
        "--port": "give --port PORT in front of --, for the first server",
        "--kv-importance-store": "give --store DIRECTORY in front of --",
        "--kv-importance-ledger": "give --ledger DIRECTORY in front of --, or the address of a database",
    }
    if is_mooncake:
        for flag in ("--kv-importance-store", *mooncake_flags()[::2]):
            cures[flag] = "leave it out, --store mooncake in front of -- chooses it"
    for word in flags:
        flag = word.partition("=")[0]
        if flag in cures:
            raise FleetError(f"{flag} behind -- is set for each server: {cures[flag]}")


def stages(options: argparse.Namespace, flags: Sequence[str]) -> list[list[Process]]:
    """Every program of the fleet; those of a stage need those of the stages before it."""
    for name in ("servers", "nodes", "store_megabytes"):
        if (number := getattr(options, name)) < 1:
            raise FleetError(f"--{name.replace('_', '-')} {number} is too few: give 1 or more")
    check_flags(flags, is_mooncake=options.store == "mooncake")
    folder: Path = options.folder
    wanted = [*flags, "--kv-importance-ledger", options.ledger or str(folder / "ledger")]
    found: list[list[Process]] = []
    if options.store == "mooncake":
        nodes = [store_node(folder, each, megabytes=options.store_megabytes) for each in range(options.nodes)]
        found = [[master(folder)], nodes]
        # What fails a check is set aside in a directory of each server's own.
        stores = [folder / f"set-aside-{number}" for number in range(options.servers)]
        wanted += mooncake_flags()
    else:
        stores = [Path(options.store or folder / "store")] * options.servers
    servers = [
        server(folder, number, options.port + number, [*wanted, "--kv-importance-store", str(store)])
        for number, store in enumerate(stores)
    ]
    found.append(servers)
    if options.router is not None:
        urls = [url(each) for each in servers]
        found.append([router(folder, urls, port=options.router, metrics_port=options.router + 1)])
    return found


def url(process: Process) -> str:
    """The address of a server, or of the router."""
    return process.health.rpartition("/")[0]


def watch(fleet: Sequence[Process], ending: Ending) -> None:
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
                with ending.held():
                    each.start()


def listen_no_more() -> None:
    """Another Ctrl-C must not end this process before those that it has started."""
    for each in ENDS:
        signal.signal(each, signal.SIG_IGN)


class Ending:
    """Ends the fleet at the first signal, a handler."""

    def __init__(self) -> None:
        self._is_held = False
        self._is_due = False

    def __call__(self, *_: object) -> None:
        listen_no_more()
        self._is_due = True
        if not self._is_held:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Waits: a program that is just being started is not yet known, and would be left behind."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._is_due:
            raise KeyboardInterrupt


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
    add(
        "--router",
        type=int,
        metavar="PORT",
        help="sglang's router in front, on this port; its metrics on the next",
    )
    add("--store", default="", help="mooncake, or a directory that all servers share")
    add("--nodes", type=int, default=2, help="store nodes of Mooncake (default: 2)")
    add("--store-megabytes", type=int, default=512, help="memory of each store node (default: 512)")
    add("--ledger", default="", help="directory or postgresql://user@host/database")
    add("--folder", type=Path, default=ROOT / ".cache" / "fleet", help="of logs, and of what is not named")
    add(
        "--start-seconds",
        type=float,
        default=START_SECONDS,
        help=f"longest wait for each program (default: {START_SECONDS:.0f})",
    )
    add("--dry-run", action="store_true", help="print the commands and start nothing")
    options = parser.parse_args(own)
    try:
        run(options, behind)
    except FleetError as error:
        sys.exit(f"fleet.py: {error}")


def run(options: argparse.Namespace, flags: Sequence[str]) -> None:
    """Starts the fleet and watches over it; ends all of it with itself."""
    started_in_order = stages(options, flags)
    fleet = [each for stage in started_in_order for each in stage]
    if options.dry_run:
        for each in fleet:
            print(shlex.join(each.command))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    servers = [url(each) for each in fleet if each.name.startswith("server-")]
    ending = Ending()
    for each in ENDS:
        if signal.getsignal(each) is not signal.SIG_IGN:  # as below nohup
            signal.signal(each, ending)
    try:
        fetch_model(started_in_order[-1 if options.router is None else -2][0].command)
        for each in fleet:
            if each.is_healthy():
                raise FleetError(
                    f"something answers at {each.health} already: stop it, or choose another port"
                )
        for stage in started_in_order:
            for each in stage:
                with ending.held():
                    each.start()
            names = ", ".join(each.name for each in stage)
            print(f"waiting for {names}: logs in {options.folder}", flush=True)
            for each in stage:
                each.wait_ready(options.start_seconds)
        print(f"{len(fleet)} processes are ready")
        if options.router is not None:
            print(f"send requests to {url(fleet[-1])}")
        print(f"look at it: sgl-importance fleet {' '.join(servers)}", flush=True)
        watch(fleet, ending)
    except KeyboardInterrupt:
        pass
    finally:
        listen_no_more()
        stop_all(fleet)


if __name__ == "__main__":
    main()
