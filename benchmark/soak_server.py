"""A real server under mixed HTTP load: resident memory of every process, counters, the snapshot."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from growth import known, slope

from sgl_importance.embedded_model import checkpoint_path
from sgl_importance.metrics_table import PREFIX
from sgl_importance_lab.probe.tasks import make_document

from support.servers import ServerProcess

CONCURRENCY = 8
POOL_TOKENS = 8192
FLAGS = (
    *("--page-size", "16", "--max-total-tokens", str(POOL_TOKENS)),
    *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--chunked-prefill-size", "512"),
)
SAMPLE_SECONDS = 2.0
CURVE_POINTS = 24  # of each process's memory: does it level off?
SALTS = (None, None, "tenant-a", "tenant-b")


@dataclass
class _Load:
    """Requests in flight and what became of them."""

    base_url: str
    model: str
    rng: random.Random
    happened: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._documents = [make_document(self.rng.choice((300, 600, 1200)), seed) for seed in range(12)]
        self._scans = 1000

    def _body(self) -> dict[str, Any]:
        kind = self.rng.choices(("shared", "scan", "long", "turns"), (6, 2, 1, 3))[0]
        self.happened[kind] += 1
        if kind == "scan":
            self._scans += 1
            document = make_document(900, self._scans)
        elif kind == "long":
            self._scans += 1
            document = make_document(3500, self._scans)
        else:
            document = self.rng.choice(self._documents)
        names = list(document.records)
        messages = document.messages(self.rng.choice(names))
        if kind == "turns":
            for name in self.rng.sample(names, min(2, len(names))):
                messages += [
                    {"role": "assistant", "content": document.records[name]},
                    {"role": "user", "content": f"Question: {name}"},
                ]
        salt = self.rng.choice(SALTS)
        return {
            "model": self.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": self.rng.choice((1, 4, 16, 48)),
            "ignore_eos": self.rng.random() < 0.3,
            "stream": True,
            **({"cache_salt": salt} if salt else {}),
        }

    async def one(self, client: httpx.AsyncClient) -> None:
        leave_after = self.rng.randrange(1, 6) if self.rng.random() < 0.15 else None
        async with client.stream("POST", "/v1/chat/completions", json=self._body()) as answer:
            if answer.status_code != 200:
                self.happened[f"status {answer.status_code}"] += 1
                return
            lines = 0
            async for line in answer.aiter_lines():
                if line.startswith('data: {"error"'):
                    self.happened["error in stream"] += 1
                lines += bool(line)
                if leave_after is not None and lines >= leave_after:
                    self.happened["left mid-stream"] += 1
                    return
        self.happened["finished"] += 1


def _memory(root: psutil.Process) -> dict[str, int]:
    """Resident bytes by process: the launcher, and its children in order of their start."""
    found = {"launcher": root.memory_info().rss}
    for child in sorted(
        root.children(recursive=True), key=lambda process: (process.create_time(), process.pid)
    ):
        try:
            title = child.cmdline()[0].split("::")[-1] if child.cmdline() else child.name()
            found[f"{Path(title).name} {len(found)}"] = child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return found


async def _check_sizes(client: httpx.AsyncClient) -> dict[str, Any]:
    """Sizes of the tiers of a server that tells them."""
    document = (await client.get("/kv_importance", params={"limit": 5})).raise_for_status().json()
    tiers: dict[str, Any] = document["tiers"]
    for tier, size in tiers.items():
        if size["total_tokens"]:
            assert 0 <= size["used_tokens"] <= size["total_tokens"], (tier, size)
    return tiers


async def _run(
    server: ServerProcess, requests: int, *, is_ours: bool, max_seconds: float, seed: int
) -> dict[str, Any]:
    load = _Load(server.base_url, server.name, random.Random(seed))
    root = psutil.Process(server.pid)
    samples: list[tuple[float, int, dict[str, int]]] = []
    end = time.monotonic() + max_seconds
    started = 0
    done = 0

    async with httpx.AsyncClient(base_url=server.base_url, timeout=120, trust_env=False) as client:

        async def worker() -> None:
            nonlocal started, done
            while started < requests and time.monotonic() < end:
                started += 1
                try:
                    await load.one(client)
                except httpx.HTTPError as error:
                    load.happened[type(error).__name__] += 1
                done += 1

        workers = [asyncio.create_task(worker()) for _ in range(CONCURRENCY)]
        while not all(task.done() for task in workers):
            samples.append((time.monotonic(), done, _memory(root)))
            tiers = await _check_sizes(client) if is_ours else {}
            if len(samples) % 30 == 0:
                print(f"{done} requests {tiers.get('device', '')}", flush=True)
            await asyncio.sleep(SAMPLE_SECONDS)
        await asyncio.gather(*workers)
    return {"load": load, "samples": samples, "done": done}


def _at_rest(server: ServerProcess, requests: int) -> dict[str, Any]:
    """Books of an idle server, before and after a flush."""
    time.sleep(2)
    nodes: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        page = server.get("/kv_importance", limit=1000, **({"cursor": cursor} if cursor else {}))
        nodes += page["nodes"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    tiers = page["tiers"]
    for tier in ("device", "host"):
        listed = sum(node["tokens"] for node in nodes if tier in node["tiers"])
        assert tiers[tier]["used_tokens"] == listed, (tier, tiers[tier], listed)
    counted = {
        "admitted": server.metric(f"{PREFIX}requests_total"),
        "evicted_device_tokens": server.metric(f"{PREFIX}evicted_tokens_total", tier="device"),
        "evicted_by_upstream": server.metric("sglang:evicted_tokens_total"),
        "hit_tokens": {
            tier: server.metric(f"{PREFIX}hit_tokens_total", tier=tier) for tier in ("device", "host")
        },
    }
    # Requests that left before their prefill are never admitted; sglang's own checks of health are.
    assert 0.8 * requests <= counted["admitted"] <= requests + 20, counted
    assert counted["evicted_device_tokens"] == counted["evicted_by_upstream"] > 0, counted
    server.flush_cache()
    empty = server.get("/kv_importance", limit=1)["tiers"]
    assert empty["device"]["used_tokens"] == empty["host"]["used_tokens"] == 0, empty
    return {"nodes": len(nodes), **counted}


def soak_server(requests: int, *, policy: str, max_seconds: float, seed: int) -> dict[str, Any]:
    """Starts a server, loads it, and returns the row; AssertionError where its books do not agree.

    Under ``default``, stock sglang, only its memory is looked at: what of the growth is not ours.
    """

    is_ours = policy != "default"
    with ServerProcess("--kv-policy", policy, *FLAGS, model=checkpoint_path()) as server:
        begin = time.monotonic()
        outcome = asyncio.run(_run(server, requests, is_ours=is_ours, max_seconds=max_seconds, seed=seed))
        seconds = time.monotonic() - begin
        rest = _at_rest(server, outcome["done"]) if is_ours else {}
        complaints = [
            line for line in server.log().splitlines() if "Traceback" in line or "leak" in line.lower()
        ]
    assert not complaints, complaints[:3]
    samples = outcome["samples"]
    done = [number for _, number, _ in samples]
    points = np.linspace(0, len(samples) - 1, CURVE_POINTS).round().astype(int)
    memory, growths = {}, []
    for name in samples[-1][2]:
        sizes = [sizes.get(name, np.nan) / 2**20 for _, _, sizes in samples]
        growth, error = slope(done, sizes)
        growths.append(1024 * growth)
        memory[name] = {
            "mib": round(sizes[-1], 1),
            "kib_per_1000_requests": known(1024 * growth, 1),
            "standard_error": known(1024 * error, 1),
            "mib_at_points": [known(sizes[point], 1) for point in points],
        }
    return {
        "mode": "server",
        "policy": policy,
        "operations": outcome["done"],
        "seconds": round(seconds, 1),
        "concurrency": CONCURRENCY,
        "requests_at_points": [done[point] for point in points],
        "rss_mib": round(sum(each["mib"] for each in memory.values()), 1),
        "rss_kib_per_1000_operations": known(sum(growths), 1),
        "happened": dict(outcome["load"].happened),
        "memory": memory,
        "at_rest": rest,
    }
