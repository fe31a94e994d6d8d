"""sglang, stock or with our package, as one of the servers that are compared."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmark.peers.environments import lmcache_packages, lmcache_python
from benchmark.peers.lmcache_server import LMCache, lmcache
from benchmark.peers.served import AT_A_TIME, CHUNK, HOST_RATIO, Served, context
from benchmark.peers.workloads import PAGE

from support.config_file import config_flags
from support.servers import ServerProcess

LMCACHE = ("--enable-lmcache",)
HICACHE = ("--enable-hierarchical-cache", "--hicache-ratio", str(HOST_RATIO))
OBSERVED_SECONDS = 60
OWN_REQUESTS = 1
"""With which sglang asks its server before anybody does; nothing of them is found."""
MISSED = "sglang:kv_importance_missed_tokens_total"


@dataclass(frozen=True)
class Sglang(Served):
    """One of these servers.

    Attributes:
        learns: whether a prompt changes how later ones are treated, beyond what is cached.
        lmcache: its host tier, where that is not HiCache.
    """

    learns: bool
    process: ServerProcess
    lmcache: LMCache | None

    def empty(self) -> None:
        assert not self.learns, "start it anew: it would remember how its prefixes were used"
        self.process.flush_cache()
        if self.lmcache is not None:
            self.lmcache.empty()

    def missed(self) -> dict[str, float]:
        if not self.learns:
            return {}
        found: dict[str, float] = {}
        for series, value in self.process.metrics().items():
            name, _, labels = series.partition("{")
            if name == MISSED and value:
                reason = re.search(r'reason="([^"]+)"', labels)
                assert reason is not None, series
                found[reason[1]] = found.get(reason[1], 0.0) + value
        return found

    def predicted(self, requests: int) -> dict[str, int]:
        if "observe" not in self.flags:
            return {}
        asked = requests + OWN_REQUESTS
        for _ in range(OBSERVED_SECONDS):  # shadows have a thread of their own
            told = self.process.get("/kv_importance")["observe"]
            if told["requests"] == asked:
                return {name: told[name] for name in ("lru_hit_tokens", "importance_hit_tokens")}
            time.sleep(1)
        raise AssertionError(f"observe saw {told['requests']} of {asked} requests")


@contextmanager
def sglang(flags: tuple[str, ...], model: Path, pool: int, *, has_store: bool) -> Iterator[Sglang]:
    """A server; our store keeps its pages in a new folder, and LMCache has a server, where there is one."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        given = (*common_flags(pool), *flags, *(store_flags(folder) if has_store else ()))
        host_tier, env = None, None
        if LMCACHE[0] in flags:
            host_tier = stack.enter_context(lmcache(lmcache_python(), model, pool))
            config = Path(folder) / "lmcache.yaml"
            config.write_text(f"mp_host: 127.0.0.1\nmp_port: {host_tier.port}\n")
            given = (*given, "--lmcache-config-file", str(config))
            env = {"PYTHONPATH": str(lmcache_packages())}
        server = stack.enter_context(
            ServerProcess(*given, model=model, env=env, imports_anew=env is not None)
        )
        told = int(server.get("/server_info")["max_total_num_tokens"])
        shown = [Path(word).name if os.sep in word else word for word in given]
        shown += host_tier.flags if host_tier is not None else []
        learns = "--kv-policy" in flags
        yield Sglang(server.base_url, server.name, told, server.pid, shown, learns, server, host_tier)


def common_flags(pool: int) -> tuple[str, ...]:
    return (
        *("--max-total-tokens", str(pool), "--page-size", str(PAGE), "--context-length", str(context(pool))),
        *("--chunked-prefill-size", str(CHUNK), "--max-running-requests", str(AT_A_TIME)),
        *("--attention-backend", "torch_native"),
    )


def store_flags(folder: str) -> tuple[str, ...]:
    """Reads are waited for, however slow the disk is: counts shall not hang on it."""
    waits = config_flags(store={"fetch_timeout_ms": 60_000})
    return ("--kv-importance-store", folder, "--hicache-storage-prefetch-policy", "wait_complete", *waits)
