"""The servers that are compared, with flags that give each the same pool, page, chunk and precision."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmark.peers.environments import vllm_python
from benchmark.peers.workloads import PAGE

from support.config_file import config_flags
from support.servers import ServerProcess, free_port

CHUNK = 512
AT_A_TIME = 8
HOST_RATIO = 2  # of the host tier to the device's pool
CONTEXT = 8_192  # SmolLM2's
START_SECONDS = 900.0
OBSERVED_SECONDS = 60
HICACHE = ("--enable-hierarchical-cache", "--hicache-ratio", str(HOST_RATIO))
OURS = ("--kv-policy", "importance")


@dataclass(frozen=True)
class Arm:
    """One server of the comparison.

    Attributes:
        tiers: "device", or "host" where KV may also lie in a host tier of ``HOST_RATIO`` pools, or "storage"
            where it may lie in files too.
        flags: of sglang's, beside those of all; None where it is vLLM.
        has_store: whether our store keeps pages in a folder, which is new for each server.
    """

    tiers: str
    flags: tuple[str, ...] | None
    has_store: bool = False

    @property
    def learns(self) -> bool:
        """Whether a prompt changes how later ones are treated, beyond what is cached."""
        return self.flags is not None and "--kv-policy" in self.flags


ARMS = {
    "vLLM": Arm("device", None),
    "stock sglang": Arm("device", ()),
    "ours": Arm("device", OURS),
    "stock + HiCache": Arm("host", HICACHE),
    "ours + HiCache": Arm("host", (*OURS, *HICACHE)),
    "ours + store": Arm("storage", (*OURS, *HICACHE), has_store=True),
    "observe": Arm("device", ("--kv-policy", "observe")),
}


@dataclass(frozen=True)
class Served:
    """A server that answers.

    Attributes:
        pool: tokens of KV on the device, as the server itself says.
        learns: from one prompt to the next, so that each row wants a new one.
        sglang: it, where it is no vLLM.
    """

    url: str
    model: str
    pool: int
    flags: list[str]
    learns: bool = False
    sglang: ServerProcess | None = None

    def predicted(self, requests: int) -> dict[str, int]:
        """Prompt tokens that the shadows of ``observe`` have found after so many requests; else nothing."""
        if self.sglang is None or "observe" not in self.flags:
            return {}
        for _ in range(OBSERVED_SECONDS):  # shadows have a thread of their own
            told = self.sglang.get("/kv_importance")["observe"]
            if told["requests"] == requests:
                return {name: told[name] for name in ("lru_hit_tokens", "importance_hit_tokens")}
            time.sleep(1)
        raise AssertionError(f"observe saw {told['requests']} of {requests} requests")

    def missed(self) -> dict[str, float]:
        """Prompt tokens that were not found, by reason; ours alone says it."""
        if self.sglang is None or not self.learns:
            return {}
        found = {}
        for series, value in self.sglang.metrics().items():
            name, _, labels = series.partition("{")
            if name == "sglang:kv_importance_missed_tokens_total" and value:
                reason = re.search(r'reason="([^"]+)"', labels)
                assert reason is not None, series
                found[reason[1]] = found.get(reason[1], 0.0) + value
        return found

    def empty(self) -> None:
        """Forgets every prefix, as a new server would; ours would remember how it was used."""
        assert not self.learns, "start it anew"
        if self.sglang is None:
            httpx.post(f"{self.url}/reset_prefix_cache", timeout=60).raise_for_status()
        else:
            self.sglang.flush_cache()


def context(pool: int) -> int:
    """The longest sequence, tokens. vLLM starts only where one fits, and tells its pool in such."""
    return min(CONTEXT, pool)


def sglang_flags(pool: int) -> tuple[str, ...]:
    return (
        *("--max-total-tokens", str(pool), "--page-size", str(PAGE), "--context-length", str(context(pool))),
        *("--chunked-prefill-size", str(CHUNK), "--max-running-requests", str(AT_A_TIME)),
        *("--attention-backend", "torch_native"),
    )


def started(arm: Arm, model: Path, pool: int) -> AbstractContextManager[Served]:
    return vllm(model, pool) if arm.flags is None else sglang(arm, model, pool)


@contextmanager
def sglang(arm: Arm, model: Path, pool: int) -> Iterator[Served]:
    flags = (*sglang_flags(pool), *(arm.flags or ()))
    with tempfile.TemporaryDirectory() as folder:
        store = store_flags(folder) if arm.has_store else ()
        with ServerProcess(*flags, *store, model=model) as server:
            told = server.get("/server_info")
            pool_told = int(told["max_total_num_tokens"])
            names = [Path(word).name if os.sep in word else word for word in (*flags, *store)]
            yield Served(server.base_url, server.name, pool_told, names, arm.learns, server)


def store_flags(folder: str) -> tuple[str, ...]:
    """Reads are waited for, however slow the disk is: counts shall not hang on it."""
    waits = config_flags(store={"fetch_timeout_ms": 60_000})
    return ("--kv-importance-store", folder, "--hicache-storage-prefetch-policy", "wait_complete", *waits)


@contextmanager
def vllm(model: Path, pool: int) -> Iterator[Served]:
    port, name = free_port(), f"peer-{uuid.uuid4().hex}"
    flags = [
        *("--dtype", "float32", "--block-size", str(PAGE), "--max-model-len", str(context(pool))),
        *("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", str(AT_A_TIME), "--enforce-eager"),
        # One block is never given to a request.
        *("--num-gpu-blocks-override", str(pool // PAGE + 1), "--enable-prompt-tokens-details"),
    ]
    words = [str(vllm_python()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    words += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), *flags]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # its route that empties the cache
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as stream:
            process = subprocess.Popen(words, env=env, stdout=stream, stderr=stream, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, name, log)
            tokens = re.search(r"KV cache size: ([\d,]+) tokens", log.read_text())
            assert tokens is not None, "vLLM does not say how large its pool is"
            yield Served(url, name, int(tokens[1].replace(",", "")) - PAGE, flags)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], url: str, name: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with {process.returncode}\n{log.read_text()[-4000:]}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=10).status_code == 200:
                models: Any = httpx.get(f"{url}/v1/models", timeout=60).json()
                assert models["data"][0]["id"] == name, "another server answers on this port"
                return
        time.sleep(1)
    raise RuntimeError(f"vLLM was not ready after {START_SECONDS:.0f} s\n{log.read_text()[-4000:]}")
