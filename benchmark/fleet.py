"""Two servers over one store: what is killed under them, and what sharing is worth.

Faults: prompts that one server has stored are asked from the other, before, while and after a part of the
fleet is dead; every answer is compared with that of a server without any cache. Sharing: the same requests,
in the same order, to two servers that share nothing, a directory, or Mooncake. Everything runs on this
machine; Mooncake, where its package and libibverbs are installed, by TCP.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from results import RESULTS, print_rows, write_results
from rich.progress import Progress

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("test", "scripts")]
from fleet_processes import FleetError, Process, master, mooncake_flags, store_node

from support import warm_start
from support.models import write_random_llama
from support.servers import ServerProcess, free_port
from support.store_bench import (
    COMMON_FLAGS,
    FETCH_TIMEOUT_SECONDS,
    PROMPT_PAGES,
    PROMPT_TOKENS,
    PROMPTS,
    answer,
    count,
    flush,
)

NAME = "fleet"
"""Under which all servers serve: upstream puts it in front of the names of Mooncake's records."""
SET = 8
"""Prompts that are asked in each phase of a fault."""
BACK_SECONDS = 90.0
NODE_MEGABYTES = 64
FULL_MEGABYTES = 16  # the least that Mooncake takes, less than all prompts need
REQUESTS, DISTINCT, CLIENTS = 240, 60, 4


class Store(StrEnum):
    NOTHING = "nothing"
    DIRECTORY = "directory"
    MOONCAKE = "mooncake"


class Mooncake:
    """A master and store nodes on free ports."""

    def __init__(self, folder: Path, nodes: int, megabytes: int) -> None:
        port = free_port()
        self.flags = mooncake_flags(port)
        self.master = master(folder, port=port, http_port=free_port())
        self.nodes = [
            store_node(
                folder, each, megabytes=megabytes, master_port=port, port=free_port(), http_port=free_port()
            )
            for each in range(nodes)
        ]

    def __enter__(self) -> Mooncake:
        try:
            for each in (self.master, *self.nodes):
                each.start()
                each.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for each in (*self.nodes, self.master):
            each.stop(signal.SIGKILL)


class Fleet:
    """Two servers, the answers that must come, and prompts that nobody has asked yet.

    Args:
        servers: that share a store.
        references: the answer to every prompt.
    """

    def __init__(self, servers: Sequence[ServerProcess], references: Sequence[list[int]]) -> None:
        self.servers = list(servers)
        self.wrong = self.asked = 0
        self.slowest = 0.0
        self._references = references
        self._next = 0

    def fresh(self, prompts: int = SET) -> list[int]:
        self._next += prompts
        assert self._next <= PROMPTS, "too few prompts"
        return list(range(self._next - prompts, self._next))

    def ask(self, server: ServerProcess, prompts: Sequence[int]) -> float:
        """Asks them and checks the answers; the share of their whole pages that came from storage."""
        tokens = 0
        for index in prompts:
            began = time.monotonic()
            reply = answer(server, index)
            self.slowest = max(self.slowest, time.monotonic() - began)
            self.asked += 1
            self.wrong += reply["output_ids"] != self._references[index]
            tokens += (reply["meta_info"]["cached_tokens_details"] or {}).get("storage", 0)
        return tokens / (len(prompts) * PROMPT_PAGES * 16)

    def store(self, server: ServerProcess, prompts: Sequence[int]) -> None:
        """Asks them, and waits until their pages are written, or given up."""
        before = count(server, "written_pages") + count(server, "unwritten_pages")
        self.ask(server, prompts)
        deadline = time.monotonic() + 20
        wanted = before + len(prompts) * PROMPT_PAGES
        while count(server, "written_pages") + count(server, "unwritten_pages") < wanted:
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)

    def forget(self) -> None:
        """Empties the memory of both: what is found then comes from the store."""
        for server in self.servers:
            flush(server)

    def phase(self, prompts: Sequence[int]) -> float:
        """Asks both servers, each with an empty memory; the share that came from storage."""
        self.forget()
        return sum(self.ask(server, prompts) for server in self.servers) / len(self.servers)


Fault = tuple[str, Callable[[Fleet], None], Callable[[Fleet], None]]
"""What is done, how, and how it is mended."""


def fault_row(fleet: Fleet, fault: Fault) -> dict[str, Any]:
    """Asks before, during and after a fault."""
    name, do, mend = fault
    one, other = fleet.servers
    fleet.asked = fleet.wrong = 0
    fleet.slowest = 0.0
    known, new = fleet.fresh(), fleet.fresh(2)
    fleet.store(one, known)
    fleet.forget()
    before = fleet.ask(other, known)
    do(fleet)
    during = fleet.phase(known)
    for server in fleet.servers:
        fleet.ask(server, new)
    slowest = fleet.slowest
    mend(fleet)
    began = time.monotonic()
    after = 0.0
    while time.monotonic() - began < BACK_SECONDS:
        # As traffic would: what is asked again is stored again.
        fleet.store(one, known)
        fleet.forget()
        if (after := fleet.ask(other, known)) > 0.5:
            break
        fleet.forget()
        time.sleep(1)
    print(f"{name}: {fleet.wrong} of {fleet.asked} wrong, {before:.2f} {during:.2f} {after:.2f}", flush=True)
    return {
        "fault": name,
        "asked": fleet.asked,
        "wrong_tokens": fleet.wrong,
        "slowest_answer_seconds": round(slowest, 2),
        "from_store_before": round(before, 3),
        "from_store_during": round(during, 3),
        "from_store_after": round(after, 3),
    }


def killed(process: Process) -> tuple[Callable[[Fleet], None], Callable[[Fleet], None]]:
    def mend(_: Fleet) -> None:
        process.start()
        process.wait_ready()

    return lambda _: process.stop(signal.SIGKILL), mend


def kill_server(fleet: Fleet) -> None:
    """SIGKILL to all of its processes; it is asked again once it is back."""
    victim = fleet.servers[0]
    victim._end()
    victim.spawn()
    victim.wait_ready()


def fill(fleet: Fleet) -> None:
    """Asks more than the store holds."""
    fleet.forget()
    fleet.store(fleet.servers[0], range(PROMPTS))


def nothing(_: Fleet) -> None:
    pass


# ---- servers ----


def store_flags(directory: Path, *more: str) -> list[str]:
    extra = () if more else ("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}')
    return [
        *COMMON_FLAGS,
        *("--kv-policy", "importance", "--hicache-ratio", "2", "--kv-importance-store", str(directory)),
        *("--kv-importance-fetch-timeout-ms", str(int(1000 * FETCH_TIMEOUT_SECONDS))),
        *("--hicache-storage-prefetch-policy", "wait_complete", "--kv-importance-prewarm", "off"),
        *extra,
        *more,
    ]


@contextmanager
def two_servers(
    model: Path, folder: Path, store: Store, *, nodes: int = 2, megabytes: int = NODE_MEGABYTES
) -> Iterator[tuple[list[ServerProcess], Mooncake | None]]:
    """Two servers over a store of their own, and Mooncake where it is the store."""
    folder.mkdir()
    with ExitStack() as stack:
        mooncake = None
        if store is Store.MOONCAKE:
            mooncake = stack.enter_context(Mooncake(folder, nodes, megabytes))
        servers = []
        for number in range(2):
            directory = folder / ("store" if store is Store.DIRECTORY else f"store-{number}")
            flags = store_flags(directory, *(() if mooncake is None else mooncake.flags))
            server = ServerProcess(*flags, "--served-model-name", NAME, model=model)
            server.name = NAME
            server.expects_faults = True
            servers.append(stack.enter_context(server))
        yield servers, mooncake


def references_of(model: Path) -> list[list[int]]:
    flags = ("--kv-policy", "default", "--disable-radix-cache", *COMMON_FLAGS)
    with ServerProcess(*flags, model=model) as server:
        return [answer(server, index)["output_ids"] for index in range(PROMPTS)]


# ---- the two studies ----


Rows = list[dict[str, Any]]


def study_faults(model: Path, folder: Path, store: Store, references: list[list[int]]) -> Rows:
    with two_servers(model, folder, store) as (servers, mooncake):
        fleet = Fleet(servers, references)
        faults: list[Fault] = [("kill -9 of a server", kill_server, nothing)]
        if mooncake is not None:
            faults += [
                ("kill -9 of a store node", *killed(mooncake.nodes[0])),
                ("kill -9 of the master", *killed(mooncake.master)),
            ]
        rows = [fault_row(fleet, fault) for fault in faults]
    if store is Store.MOONCAKE:
        with two_servers(model, folder / "full", store, nodes=1, megabytes=FULL_MEGABYTES) as (
            servers,
            _,
        ):
            rows.append(fault_row(Fleet(servers, references), ("a full store", fill, nothing)))
    return [{"study": "faults", "store": store.value, **row} for row in rows]


def study_sharing(model: Path, folder: Path, store: Store, references: list[list[int]]) -> Rows:
    """The same requests to both servers, each by a coin, by several clients."""
    rng = random.Random(7)
    requests = [(int(DISTINCT * rng.random() ** 2), rng.randrange(2)) for _ in range(REQUESTS)]
    with two_servers(model, folder, store) as (servers, _):

        def one(request: tuple[int, int]) -> tuple[dict[str, int], bool]:
            index, number = request
            reply = answer(servers[number], index)
            details = reply["meta_info"]["cached_tokens_details"] or {}
            return details, reply["output_ids"] == references[index]

        began = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(one, requests))
        seconds = time.monotonic() - began
    prompt_tokens = REQUESTS * PROMPT_TOKENS
    tiers = ("device", "host", "storage")
    found = {tier: sum(details.get(tier, 0) for details, _ in answers) for tier in tiers}
    row = {
        "study": "sharing",
        "store": store.value,
        "requests": REQUESTS,
        "prompt_tokens": prompt_tokens,
        "wrong_tokens": sum(not right for _, right in answers),
        **{f"from_{tier}": round(tokens / prompt_tokens, 4) for tier, tokens in found.items()},
        "computed": round(1 - sum(found.values()) / prompt_tokens, 4),
        "requests_per_second": round(REQUESTS / seconds, 2),
    }
    return [row]


def main(
    stores: Annotated[
        list[Store] | None,
        typer.Option("--store", help="To try, several times for several; rows of the others are kept."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File in place of benchmark/results/fleet.json.")] = None,
) -> None:
    """Kill parts of a fleet, and measure what sharing is worth."""
    chosen = stores or list(Store)
    warm_start.is_on = True  # no start is measured
    path = out or RESULTS / "fleet.json"
    known: Rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [row for row in known if row["store"] not in chosen]
    with tempfile.TemporaryDirectory() as temporary, Progress() as progress:
        folder = Path(temporary)
        (folder / "model").mkdir()
        model = write_random_llama(folder / "model")
        task = progress.add_task("Fleet", total=2 * len(chosen) + 1)
        references = references_of(model)
        progress.advance(task)
        for store in chosen:
            try:
                rows += study_sharing(model, folder / f"sharing-{store}", store, references)
                progress.advance(task)
                if store is not Store.NOTHING:
                    rows += study_faults(model, folder / f"faults-{store}", store, references)
                progress.advance(task)
            except FleetError as error:
                sys.exit(f"fleet.py: {error}")
    for study in ("sharing", "faults"):
        if chosen_rows := [row for row in rows if row["study"] == study]:
            print_rows(study, chosen_rows)
    write_results("fleet", rows, out=out)


if __name__ == "__main__":
    typer.run(main)
