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
from sgl_importance_lab.probe.tokenizer import encode

from support.servers import ServerProcess
from support.victims import cores_of_ranks

CONCURRENCY = 8
POOL_TOKENS = 8192
FLAGS = (
    *("--page-size", "16", "--max-total-tokens", str(POOL_TOKENS)),
    *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--chunked-prefill-size", "512"),
)
SAMPLE_SECONDS = 2.0
CURVE_POINTS = 24  # of each process's memory: does it level off?
SALTS = (None, None, "tenant-a", "tenant-b")
ROUTES = {"/v1/chat/completions": 6, "/generate": 3, "/v1/messages": 2, "/v1/responses": 1}
"""With how often they are taken."""


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

    def _asked(self) -> tuple[str, dict[str, Any]]:
        """A route, and what to ask it."""
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
        (route,) = self.rng.choices(list(ROUTES), list(ROUTES.values()))
        self.happened[route] += 1
        salt, session = self.rng.choice(SALTS), f"session {self.rng.randrange(50)}"
        body = {"model": self.model, "stream": True, **({"cache_salt": salt} if salt else {})}
        tokens = self.rng.choice((1, 4, 16, 48))
        if route == "/generate":
            self.happened["constrained"] += (is_constrained := self.rng.random() < 0.2)
            params = {
                "temperature": 0,
                "max_new_tokens": tokens,
                **({"regex": "[a-z ]+"} if is_constrained else {}),
            }
            hints = {"report": True, "session_over": self.rng.random() < 0.3, "retain": {"ttl_seconds": 2}}
            asked = {"input_ids": encode(messages), "session_id": session, "sampling_params": params}
            return route, {**body, **asked, "kv_hints": hints}
        if route == "/v1/responses":
            return route, {**body, "input": messages, "max_output_tokens": 2 + tokens, "session_id": session}
        ending = {"ignore_eos": self.rng.random() < 0.3} if route == "/v1/chat/completions" else {}
        return route, {**body, "messages": messages, "temperature": 0, "max_tokens": tokens, **ending}

    async def one(self, client: httpx.AsyncClient) -> None:
        leave_after = self.rng.randrange(1, 6) if self.rng.random() < 0.15 else None
        route, body = self._asked()
        async with client.stream("POST", route, json=body) as answer:
            if answer.status_code != 200:
                self.happened[f"status {answer.status_code}"] += 1
                return
            lines = 0
            async for line in answer.aiter_lines():
                if line.startswith(('data: {"error"', "event: error")):
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


async def _check_sizes(client: httpx.AsyncClient, rank: int) -> dict[str, Any]:
    """Sizes of the tiers of a server that tells them."""
    query = {"limit": 5, "dp_rank": rank}
    document = (await client.get("/kv_importance", params=query)).raise_for_status().json()
    tiers: dict[str, Any] = document["tiers"]
    for tier, size in tiers.items():
        if size["total_tokens"]:
            assert 0 <= size["used_tokens"] <= size["total_tokens"], (tier, size)
    return tiers


async def _run(
    server: ServerProcess, requests: int, *, is_ours: bool, ranks: int, max_seconds: float, seed: int
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
            tiers = [await _check_sizes(client, rank) for rank in range(ranks if is_ours else 0)]
            if len(samples) % 30 == 0:
                print(f"{done} requests {[each['device'] for each in tiers]}", flush=True)
            await asyncio.sleep(SAMPLE_SECONDS)
        await asyncio.gather(*workers)
    return {"load": load, "samples": samples, "done": done}


def _listed(server: ServerProcess, rank: int) -> list[dict[str, Any]]:
    """The nodes of an idle rank, whose tokens are those of its tiers."""
    nodes: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        query = {"limit": 1000, "dp_rank": rank, **({"cursor": cursor} if cursor else {})}
        page = server.get("/kv_importance", **query)
        nodes += page["nodes"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    tiers = page["tiers"]
    for tier in ("device", "host"):
        listed = sum(node["tokens"] for node in nodes if tier in node["tiers"])
        assert tiers[tier]["used_tokens"] == listed, (tier, tiers[tier], listed)
    return nodes


def _at_rest(server: ServerProcess, requests: int, ranks: int) -> dict[str, Any]:
    """Books of an idle server, before and after a flush."""
    time.sleep(2)
    nodes = [node for rank in range(ranks) for node in _listed(server, rank)]
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
    for rank in range(ranks):
        empty = server.get("/kv_importance", limit=1, dp_rank=rank)["tiers"]
        assert empty["device"]["used_tokens"] == empty["host"]["used_tokens"] == 0, empty
    return {"nodes": len(nodes), **counted}


def soak_server(requests: int, *, policy: str, ranks: int, max_seconds: float, seed: int) -> dict[str, Any]:
    """Starts a server, loads it, and returns the row; AssertionError where its books do not agree.

    Under ``default``, stock sglang, only its memory is looked at: what of the growth is not ours.
    """

    is_ours = policy != "default"
    flags = ("--kv-policy", policy, *FLAGS, *(("--dp-size", str(ranks)) if ranks > 1 else ()))
    cores = cores_of_ranks(ranks) if ranks > 1 else {}
    with ServerProcess(*flags, model=checkpoint_path(), env=cores, nccl_port=ranks == 1) as server:
        begin = time.monotonic()
        outcome = asyncio.run(
            _run(server, requests, is_ours=is_ours, ranks=ranks, max_seconds=max_seconds, seed=seed)
        )
        seconds = time.monotonic() - begin
        rest = _at_rest(server, outcome["done"], ranks) if is_ours else {}
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
        "data_parallel_ranks": ranks,
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
