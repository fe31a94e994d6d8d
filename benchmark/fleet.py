"""Two servers over one store: what is killed under them, and what sharing is worth.

Faults: prompts that one server has stored are asked from the other, before, while and after a part of the
fleet is dead; every answer is compared with that of a server without any cache. Links: the same while a store
node is behind a link that is slow, narrow, lossy or cut, which needs root. Sharing: the same requests, in the
same order, to two servers that share nothing, a directory, or Mooncake, each by a coin or by sglang's router.
Router: a server is killed and comes back while clients ask through the router. Everything runs on this
machine; Mooncake, where its package and libibverbs are installed, by TCP.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from fleet_servers import Fleet, Routed, Store, references_of, two_servers
from results import RESULTS, print_rows, rows_so_far, write_results
from rich.progress import Progress
from slow_link import LinkError, Quality, SlowLink

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("test", "scripts")]
from fleet_processes import FleetError, Process

from support import warm_start
from support.models import write_random_llama
from support.store_bench import PROMPT_TOKENS, PROMPTS, answer
from support.waiting import wait_until

BACK_SECONDS = 90.0
FULL_MEGABYTES = 16  # the least that Mooncake takes, less than all prompts need
REQUESTS, DISTINCT, CLIENTS = 240, 60, 4
LOAD_SECONDS = 5.0
LINKS = {
    "100 ms each way to a store node": Quality(delay=0.1),
    "1 MB/s to a store node": Quality(rate=1e6),
    "5 % of packets lost to and from a store node": Quality(loss=0.05),
    "a cut link to a store node": Quality(loss=1),
}


class Study(StrEnum):
    SHARING = "sharing"
    FAULTS = "faults"
    LINKS = "links"
    ROUTER = "router"


class Sender(StrEnum):
    COIN = "coin"
    ROUTER = "router"


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


def worsened(link: SlowLink, quality: Quality) -> tuple[Callable[[Fleet], None], Callable[[Fleet], None]]:
    def become(quality: Quality) -> None:
        link.quality = quality

    return lambda _: become(quality), lambda _: become(Quality())


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


# ---- the studies ----


Rows = list[dict[str, Any]]


def study_faults(model: Path, folder: Path, store: Store, references: list[list[int]]) -> Rows:
    if store is Store.NOTHING:
        return []
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
    return rows


def study_links(model: Path, folder: Path, store: Store, references: list[list[int]]) -> Rows:
    """One of two store nodes is reached by a link that gets worse."""
    if store is not Store.MOONCAKE:
        return []
    with SlowLink() as link, two_servers(model, folder, store, link=link) as (servers, _):
        fleet = Fleet(servers, references)
        return [fault_row(fleet, (name, *worsened(link, quality))) for name, quality in LINKS.items()]


def study_sharing(model: Path, folder: Path, store: Store, references: list[list[int]]) -> Rows:
    return [sharing_row(model, folder / sender, store, references, sender) for sender in Sender]


def sharing_row(
    model: Path, folder: Path, store: Store, references: list[list[int]], sender: Sender
) -> dict[str, Any]:
    """The same requests to both servers, by several clients; who gets one, a coin or the router says."""
    rng = random.Random(7)
    requests = [(int(DISTINCT * rng.random() ** 2), rng.randrange(2)) for _ in range(REQUESTS)]
    folder.parent.mkdir(exist_ok=True)
    with two_servers(model, folder, store) as (servers, _), ExitStack() as stack:
        front = stack.enter_context(Routed(folder, servers)) if sender is Sender.ROUTER else None
        admitted = [server.get("/kv_importance")["hits"]["requests"] for server in servers]

        def one(request: tuple[int, int]) -> tuple[dict[str, int], bool]:
            index, number = request
            reply = answer(servers[number], index) if front is None else front.answer(index)
            assert reply is not None, "the router has an answer for every request"
            details = reply["meta_info"]["cached_tokens_details"] or {}
            return details, reply["output_ids"] == references[index]

        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(one, requests))
        busiest = max(
            server.get("/kv_importance")["hits"]["requests"] - before
            for server, before in zip(servers, admitted, strict=True)
        )
    prompt_tokens = REQUESTS * PROMPT_TOKENS
    tiers = ("device", "host", "storage")
    found = {tier: sum(details.get(tier, 0) for details, _ in answers) for tier in tiers}
    return {
        "sent_by": sender.value,
        "requests": REQUESTS,
        "prompt_tokens": prompt_tokens,
        "wrong_tokens": sum(not right for _, right in answers),
        **{f"from_{tier}": round(tokens / prompt_tokens, 4) for tier, tokens in found.items()},
        "computed": round(1 - sum(found.values()) / prompt_tokens, 4),
        "busiest_server": round(busiest / REQUESTS, 3),
    }


def study_router(model: Path, folder: Path, store: Store, references: list[list[int]]) -> Rows:
    """Clients ask without a pause while one of the servers dies, is missed, and comes back."""
    ended = threading.Event()
    with two_servers(model, folder, store) as (servers, _), Routed(folder, servers) as front:
        victim = servers[0]

        def ask(client: int) -> list[tuple[float, bool | None]]:
            rng = random.Random(client)
            answers: list[tuple[float, bool | None]] = []
            while not ended.is_set():
                index = int(DISTINCT * rng.random() ** 2)
                began = time.monotonic()
                reply = front.answer(index)
                is_right = None if reply is None else reply["output_ids"] == references[index]
                answers.append((time.monotonic() - began, is_right))
            return answers

        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(ask, client) for client in range(CLIENTS)]
            try:
                time.sleep(LOAD_SECONDS)
                victim._end()
                wait_until(lambda: not front.healthy()[victim.base_url])
                time.sleep(LOAD_SECONDS)
                victim.spawn()
                victim.wait_ready()
                wait_until(lambda: front.healthy()[victim.base_url])
                time.sleep(LOAD_SECONDS)
            finally:
                ended.set()
            answers = [each for client in clients for each in client.result()]
    row = {
        "asked": len(answers),
        "wrong_tokens": sum(is_right is False for _, is_right in answers),
        "failed": sum(is_right is None for _, is_right in answers),
        "slowest_answer_seconds": round(max(seconds for seconds, _ in answers), 2),
    }
    return [row]


STUDIES: dict[Study, Callable[[Path, Path, Store, list[list[int]]], Rows]] = {
    Study.SHARING: study_sharing,
    Study.FAULTS: study_faults,
    Study.LINKS: study_links,
    Study.ROUTER: study_router,
}


def main(
    stores: Annotated[
        list[Store] | None, typer.Option("--store", help="To try, several times for several.")
    ] = None,
    studies: Annotated[
        list[Study] | None, typer.Option("--study", help="To make, several times for several.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File in place of benchmark/results/fleet.json.")] = None,
) -> None:
    """Kill parts of a fleet, worsen its links, and measure what sharing is worth. Other rows are kept."""
    chosen = [(study, store) for study in studies or Study for store in stores or Store]
    warm_start.is_on = True  # no start is measured
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers and links end with it
    path = out or RESULTS / "fleet.json"
    known: Rows = rows_so_far(path)
    rows = [row for row in known if (row["study"], row["store"]) not in chosen]
    with tempfile.TemporaryDirectory() as temporary, Progress() as progress:
        folder = Path(temporary)
        (folder / "model").mkdir()
        model = write_random_llama(folder / "model")
        task = progress.add_task("Fleet", total=len(chosen) + 1)
        references = references_of(model)
        progress.advance(task)
        for study, store in chosen:
            try:
                found = STUDIES[study](model, folder / f"{study}-{store}", store, references)
            except (FleetError, LinkError) as error:
                sys.exit(f"fleet.py: {error}")
            rows += [{"study": study.value, "store": store.value, **row} for row in found]
            progress.advance(task)
    rows.sort(key=lambda row: (list(Study).index(row["study"]), list(Store).index(row["store"])))
    for study in Study:
        if found := [row for row in rows if row["study"] == study]:
            print_rows(study, found)
    write_results("fleet", rows, out=out)


if __name__ == "__main__":
    typer.run(main)
