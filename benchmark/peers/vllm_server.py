"""vLLM, alone or with LMCache's server beside it, as one of the servers that are compared."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmark.peers.environments import lmcache_python, vllm_python
from benchmark.peers.lmcache_server import TRACKS_NOBODY, LMCache, lmcache
from benchmark.peers.peer_process import running, threads_of
from benchmark.peers.served import AT_A_TIME, CHUNK, Served, context
from benchmark.peers.workloads import PAGE

from support.servers import free_port

ENV = TRACKS_NOBODY | {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # its route that empties the cache
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Vllm(Served):
    """One of these servers.

    Attributes:
        lmcache: its host tier, where it has one.
    """

    lmcache: LMCache | None

    def empty(self) -> None:
        httpx.post(f"{self.url}/reset_prefix_cache", timeout=60).raise_for_status()
        if self.lmcache is not None:
            self.lmcache.empty()


@contextmanager
def vllm(model: Path, pool: int, *, has_lmcache: bool, threads: int = 1) -> Iterator[Vllm]:
    port, name = free_port(), f"peer-{uuid.uuid4().hex}"
    flags = [
        *("--dtype", "float32", "--block-size", str(PAGE), "--max-model-len", str(context(pool))),
        *("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", str(AT_A_TIME), "--enforce-eager"),
        # One block is never given to a request.
        *("--num-gpu-blocks-override", str(pool // PAGE + 1), "--enable-prompt-tokens-details"),
    ]
    with ExitStack() as stack:
        host_tier, shown = None, flags
        python = vllm_python()
        if has_lmcache:
            python = lmcache_python()
            host_tier = stack.enter_context(lmcache(python, model, pool))
            told = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": host_tier.port}
            connector = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
            connector |= {"kv_connector_extra_config": told}
            shown = [*flags, "--kv-transfer-config", connector["kv_connector"], *host_tier.flags]
            flags = [*flags, "--kv-transfer-config", json.dumps(connector)]
        words = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        words += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), *flags]
        url = f"http://127.0.0.1:{port}"
        log, pid = stack.enter_context(running(words, f"{url}/health", ENV | threads_of(threads)))
        models = httpx.get(f"{url}/v1/models", timeout=60).json()
        assert models["data"][0]["id"] == name, "another server answers on this port"
        tokens = re.search(r"KV cache size: ([\d,]+) tokens", log.read_text())
        assert tokens is not None, "vLLM does not say how large its pool is"
        yield Vllm(url, name, int(tokens[1].replace(",", "")) - PAGE, pid, shown, host_tier)
