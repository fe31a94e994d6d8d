"""LMCache's server as a host tier: vLLM and sglang copy to it and back by themselves, also without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmark.peers.peer_process import running, threads_of
from benchmark.peers.served import HOST_RATIO, token_bytes
from benchmark.peers.workloads import PAGE

from support.servers import free_port

TRACKS_NOBODY = {"LMCACHE_TRACK_USAGE": "false"}


@dataclass(frozen=True)
class LMCache:
    """One of these servers.

    Attributes:
        port: at which engines reach it.
        url: of its own routes.
    """

    port: int
    url: str
    flags: list[str]

    def empty(self) -> None:
        httpx.post(f"{self.url}/cache/clear", timeout=60).raise_for_status()


@contextmanager
def lmcache(python: Path, model: Path, pool: int) -> Iterator[LMCache]:
    """A server of ``HOST_RATIO`` pools.

    Args:
        python: of the environment that has LMCache.
    """
    port, routes = free_port(), free_port()
    gib = HOST_RATIO * pool * token_bytes(json.loads((model / "config.json").read_text())) / 2**30
    flags = ["--l1-size-gb", str(gib), "--no-l1-use-lazy", "--eviction-policy", "LRU"]
    flags += ["--supported-transfer-mode", "engine_driven", "--chunk-size", str(PAGE)]
    words = [str(python.parent / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--http-host", "127.0.0.1", "--http-port", str(routes)]
    words += ["--prometheus-port", str(free_port()), *flags]
    url = f"http://127.0.0.1:{routes}"
    with running(words, f"{url}/healthcheck", TRACKS_NOBODY | threads_of(1)):
        yield LMCache(port, url, flags)
