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
from benchmark.peers.peer_process import running, threads_of
from benchmark.peers.served import AT_A_TIME, CHUNK, HOST_RATIO, Served, context, token_bytes
from benchmark.peers.workloads import PAGE

from support.servers import free_port

ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # its route that empties the cache
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Vllm(Served):
    """One of these servers.

    Attributes:
        lmcache_url: of LMCache's own routes, where there is one.
    """

    lmcache_url: str | None

    def empty(self) -> None:
        httpx.post(f"{self.url}/reset_prefix_cache", timeout=60).raise_for_status()
        if self.lmcache_url is not None:
            httpx.post(f"{self.lmcache_url}/cache/clear", timeout=60).raise_for_status()


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
        lmcache_url, shown = None, flags
        python = vllm_python()
        if has_lmcache:
            python = lmcache_python()
            lmcache_port, lmcache_url, lmcache_flags = stack.enter_context(lmcache(python, model, pool))
            told = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": lmcache_port}
            connector = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
            connector |= {"kv_connector_extra_config": told}
            shown = [*flags, "--kv-transfer-config", connector["kv_connector"], *lmcache_flags]
            flags = [*flags, "--kv-transfer-config", json.dumps(connector)]
        words = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        words += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), *flags]
        url = f"http://127.0.0.1:{port}"
        log, pid = stack.enter_context(running(words, f"{url}/health", ENV | threads_of(threads)))
        models = httpx.get(f"{url}/v1/models", timeout=60).json()
        assert models["data"][0]["id"] == name, "another server answers on this port"
        tokens = re.search(r"KV cache size: ([\d,]+) tokens", log.read_text())
        assert tokens is not None, "vLLM does not say how large its pool is"
        yield Vllm(url, name, int(tokens[1].replace(",", "")) - PAGE, pid, shown, lmcache_url)


@contextmanager
def lmcache(python: Path, model: Path, pool: int) -> Iterator[tuple[int, str, list[str]]]:
    """LMCache's server, to which vLLM copies by itself: that works without a GPU; port, routes and flags."""
    port, routes = free_port(), free_port()
    gib = HOST_RATIO * pool * token_bytes(model) / 2**30
    flags = ["--l1-size-gb", str(gib), "--no-l1-use-lazy", "--eviction-policy", "LRU"]
    flags += ["--supported-transfer-mode", "engine_driven", "--chunk-size", str(PAGE)]
    words = [str(python.parent / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--http-host", "127.0.0.1", "--http-port", str(routes)]
    words += ["--prometheus-port", str(free_port()), *flags]
    url = f"http://127.0.0.1:{routes}"
    with running(words, f"{url}/healthcheck", ENV | threads_of(1)):
        yield port, url, flags
