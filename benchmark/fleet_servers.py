"""Two servers over one store for ``benchmark/fleet.py``, the router in front, and what they are asked."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("test", "scripts")]
from fleet_processes import HOST, Process, master, mooncake_flags, router, store_node
from slow_link import HERE, THERE, SlowLink

from support.config_file import config_flags
from support.servers import REQUEST_SECONDS, ServerProcess, free_port
from support.store_bench import (
    ANSWER_TOKENS,
    COMMON_FLAGS,
    FETCH_TIMEOUT_SECONDS,
    PROMPT_PAGES,
    PROMPTS,
    answer,
    count,
    flush,
    prompt,
)

NAME = "fleet"
"""Under which all servers serve: upstream puts it in front of the names of Mooncake's records."""
SET = 8
"""Prompts that are asked in each phase of a fault."""
NODE_MEGABYTES = 64


class Store(StrEnum):
    NOTHING = "nothing"
    DIRECTORY = "directory"
    MOONCAKE = "mooncake"


class Mooncake:
    """A master and store nodes on free ports.

    Args:
        link: the last node is behind it; None where all are here.
    """

    def __init__(self, folder: Path, nodes: int, megabytes: int, link: SlowLink | None) -> None:
        here = HOST if link is None else HERE
        port = free_port()
        self.flags = mooncake_flags(port, host=here)
        self.master = master(folder, host=here, port=port, http_port=free_port())
        self.nodes = [
            store_node(
                folder,
                each,
                megabytes=megabytes,
                host=here if link is None or each < nodes - 1 else THERE,
                master_host=here,
                master_port=port,
                port=free_port(),
                http_port=free_port(),
            )
            for each in range(nodes)
        ]
        if link is not None:
            self.nodes[-1].command = link.inside(self.nodes[-1].command)

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


class Routed:
    """sglang's own router in front of servers."""

    def __init__(self, folder: Path, servers: Sequence[ServerProcess]) -> None:
        urls = [server.base_url for server in servers]
        self.process: Process = router(folder, urls, port=free_port(), metrics_port=free_port())
        url = self.process.health.removesuffix("/readiness")
        self._client = httpx.Client(base_url=url, timeout=REQUEST_SECONDS, trust_env=False)
        self._servers = len(servers)

    def __enter__(self) -> Routed:
        try:
            self.process.start()
            self.process.wait_ready()
            while sum(self.healthy().values()) < self._servers:
                time.sleep(0.2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.process.stop(signal.SIGKILL)

    def healthy(self) -> dict[str, bool]:
        """Whether it takes each server for healthy, by address."""
        rows = self._client.get("/workers").raise_for_status().json()["workers"]
        return {row["url"]: row["is_healthy"] for row in rows}

    def answer(self, index: int) -> dict[str, Any] | None:
        """The answer to a prompt, from whichever server; None where there is none."""
        sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
        body = {"input_ids": prompt(index), "sampling_params": sampling}
        answered = self._client.post("/generate", json=body)
        return answered.json() if answered.status_code == 200 else None


def store_flags(directory: Path, *more: str) -> list[str]:
    extra = () if more else ("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}')
    return [
        *COMMON_FLAGS,
        *("--kv-policy", "importance", "--hicache-ratio", "2", "--kv-importance-store", str(directory)),
        *config_flags(store={"fetch_timeout_ms": int(1000 * FETCH_TIMEOUT_SECONDS)}),
        *("--hicache-storage-prefetch-policy", "wait_complete", "--kv-importance-prewarm", "off"),
        *extra,
        *more,
    ]


@contextmanager
def two_servers(
    model: Path,
    folder: Path,
    store: Store,
    *,
    nodes: int = 2,
    megabytes: int = NODE_MEGABYTES,
    link: SlowLink | None = None,
) -> Iterator[tuple[list[ServerProcess], Mooncake | None]]:
    """Two servers over a store of their own, and Mooncake where it is the store."""
    folder.mkdir()
    with ExitStack() as stack:
        mooncake = None
        if store is Store.MOONCAKE:
            mooncake = stack.enter_context(Mooncake(folder, nodes, megabytes, link))
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
