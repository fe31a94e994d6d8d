"""llama.cpp's server as one of the servers that are compared.

Its cache is not a tree: each of its slots keeps the last sequence that it served, all of them share the pool,
and a request takes the slot whose sequence begins most like it. What a slot loses goes to a host tier, where
there is one.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmark.peers.environments import PLACE, llama_cpp
from benchmark.peers.peer_process import running, threads_of
from benchmark.peers.served import AT_A_TIME, CHUNK, HOST_RATIO, Served, token_bytes

from support.servers import free_port

# With sglang imported first, transformers does without torchvision, which is of another build here.
CONVERT = """
import runpy, sys
import sglang
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class LlamaCpp(Served):
    """One of these servers."""

    def empty(self) -> None:
        raise NotImplementedError("start it anew, which takes a second: it does not empty its host tier")


@contextmanager
def llama_cpp_server(model: Path, pool: int, *, has_host_tier: bool, threads: int = 1) -> Iterator[LlamaCpp]:
    server, sources = llama_cpp()
    port, name = free_port(), f"peer-{uuid.uuid4().hex}"
    host_mib = (
        math.ceil(HOST_RATIO * pool * token_bytes(json.loads((model / "config.json").read_text())) / 2**20)
        if has_host_tier
        else 0
    )
    flags = [
        "--ctx-size",
        str(pool),
        "--parallel",
        str(AT_A_TIME),
        "--kv-unified",
        "--batch-size",
        str(CHUNK),
    ]
    flags += ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]
    flags += ["--cache-ram", str(host_mib), "--fit", "off"]
    words = [str(server), "--model", str(gguf_of(model, sources)), "--alias", name]
    words += ["--host", "127.0.0.1", "--port", str(port), "--threads", str(threads), *flags]
    url = f"http://127.0.0.1:{port}"
    with running(words, f"{url}/health", threads_of(threads)) as (_, pid):
        models = httpx.get(f"{url}/v1/models", timeout=60).json()
        assert models["data"][0]["id"] == name, "another server answers on this port"
        told = httpx.get(f"{url}/props", timeout=60).json()["default_generation_settings"]["n_ctx"]
        yield LlamaCpp(url, name, int(told), pid, flags)


def gguf_of(model: Path, sources: Path) -> Path:
    """``model`` in llama.cpp's format, float32, made once."""
    made = PLACE / f"{model.name}.gguf"
    with (PLACE / f"{model.name}.gguf.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            partial = made.with_suffix(".partial")
            convert = [str(sources), str(sources / "convert_hf_to_gguf.py"), str(model)]
            words = [sys.executable, "-c", CONVERT, *convert, "--outtype", "f32", "--outfile", str(partial)]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            os.replace(partial, made)
    return made
