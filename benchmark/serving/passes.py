"""Measurements on a real server: what was found where, how long it took, and what a restart costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmark.serving.arms import ARMS, Arm, server_flags
from benchmark.serving.load import Answer, send_in_order
from benchmark.serving.rows import Row
from benchmark.serving.workloads import Workload, document_of
from sgl_importance.embedded_model import checkpoint_path
from sgl_importance_lab.workload.workload_request import WorkloadRequest

from support.config_file import config_flags
from support.servers import ServerProcess

Advance = Callable[[], None]
TIERS = ("device", "host", "storage")
PREWARM_SECONDS = 120.0
# Counters of the server whose growth over a workload is reported.
WRITTEN = {
    "host_bytes_written": "sglang:hicache_backup_bytes_total",
    "host_bytes_loaded": "sglang:load_back_bytes_total",
    "evicted_tokens": "sglang:evicted_tokens_total",
}


class Servers:
    """At most one server at a time, kept while the next workload can be served by it after a flush.

    Args:
        parameters: what was committed.
        model: folder of the checkpoint; the embedded model's where None.
    """

    def __init__(self, parameters: dict[str, Any], model: Path | None = None) -> None:
        self._parameters = parameters
        self._model = model or checkpoint_path()
        self._server: ServerProcess | None = None
        self._flags: tuple[str, ...] = ()
        self._env: dict[str, str] = {}

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def beside(self) -> Servers:
        """Another such server, to run beside this one."""
        return Servers(self._parameters, self._model)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def start(
        self,
        arm: Arm,
        workload: Workload,
        *,
        device_tokens: int | None = None,
        store: str = "",
        fresh: bool = True,
    ) -> ServerProcess:
        """A server with an empty cache; a new one where ``fresh``, or where the flags differ."""
        size = device_tokens or self._parameters["device_tokens"]
        flags = server_flags(arm, workload, self._parameters, size, store)
        if arm.g != "off":
            flags += config_flags(signal={"g": arm.g})
        if self._server is not None and not fresh and (flags, dict(arm.env)) == (self._flags, self._env):
            self._server.flush_cache()
            return self._server
        self.stop()
        server = ServerProcess(*flags, model=self._model, env=arm.env)
        server.__enter__()
        self._server, self._flags, self._env = server, flags, dict(arm.env)
        if workload.tiers != "storage":
            server.flush_cache()  # of what the start-up check left
        elif arm.learns:
            _await_prewarming(server)  # a flush would undo it
        return server


def _await_prewarming(server: ServerProcess) -> None:
    """Until what the server does unasked at its start is done."""
    deadline = time.monotonic() + PREWARM_SECONDS
    while any(job["state"] == "running" for job in server.get("/kv_importance/prewarm")["jobs"]):
        assert time.monotonic() < deadline, "pre-warming does not end"
        time.sleep(0.2)


# ---- deterministic ----


def count(
    servers: Servers,
    name: str,
    workload: Workload,
    advance: Advance = lambda: None,
    *,
    device_tokens: int | None = None,
) -> Row:
    """Serves the workload one request at a time; what was found where, and what was written.

    Where the workload has a restart, the row is about what comes after it, and ``storage_bytes`` about what
    lies in storage at the restart.
    """
    arm = ARMS[name]
    split = workload.restart_after or 0
    fresh = arm.learns or workload.tiers == "storage"
    row: Row = {"workload": workload.name, "arm": name}
    with TemporaryDirectory(prefix="serving-store-") as store:

        def serve(requests: Sequence[WorkloadRequest], *, fresh: bool) -> Row:
            server = servers.start(arm, workload, store=store, device_tokens=device_tokens, fresh=fresh)
            return count_in_order(server, requests, advance)

        if split:
            before = serve(workload.requests[:split], fresh=True)
            servers.stop()
            row["storage_bytes"] = sum(
                file.stat().st_size for file in Path(store).rglob("*") if file.is_file()
            )
            row["hit_rate_before_restart"] = before["hit_rate"]
            row["host_bytes_before_restart"] = before["host_bytes_written"]
        row |= serve(workload.requests[split:], fresh=fresh)
        if workload.tiers == "storage":
            servers.stop()  # before its store goes
    return row


def count_in_order(
    server: ServerProcess, requests: Sequence[WorkloadRequest], advance: Advance = lambda: None
) -> Row:
    """Sends one request at a time; what was found where, and what was written meanwhile."""
    with _growth(server) as grown:
        answers = send_in_order(server.base_url, server.name, requests, advance)
    return {**counts_of(answers), **grown}


@contextmanager
def _growth(server: ServerProcess) -> Iterator[dict[str, float]]:
    """Filled at the end with how much the server's counters grew."""
    grown: dict[str, float] = {}
    before = server.metrics()
    yield grown
    after = server.metrics()

    def growth(name: str, label: str = "") -> int:
        return round(
            sum(
                value - before.get(series, 0.0)
                for series, value in after.items()
                if series.partition("{")[0] == name and label in series
            )
        )

    for tier in TIERS:
        grown[f"{tier}_hit_tokens"] = growth("sglang:cached_tokens_total", f'cache_source="{tier}')
    for key, name in WRITTEN.items():
        grown[key] = growth(name)


def counts_of(answers: Sequence[Answer]) -> Row:
    """What was found, and how often the answer was right."""
    prompt = sum(answer.prompt_tokens for answer in answers)
    cached = sum(answer.cached_tokens for answer in answers)
    graded = [answer.correct for answer in answers if answer.correct is not None]
    return {
        "requests": len(answers),
        "prompt_tokens": prompt,
        "uncached_tokens": prompt - cached,
        "hit_rate": round(cached / prompt, 4),
        "exact_match": round(sum(graded) / len(graded), 4) if graded else None,
    }


# ---- after a restart ----


def time_first_requests(servers: Servers, name: str, workload: Workload) -> Iterator[Row]:
    """After a restart: time to first token of each document's first question, and of its second.

    The second finds in device memory what the first brought there: it is the warm one.
    """
    arm = ARMS[name]
    assert workload.restart_after is not None, f"{workload.name} has no restart"
    known, later = workload.requests[: workload.restart_after], workload.requests[workload.restart_after :]
    with TemporaryDirectory(prefix="serving-store-") as store:
        server = servers.start(arm, workload, store=store)
        send_in_order(server.base_url, server.name, known)
        server = servers.start(arm, workload, store=store)
        by_document: dict[int, list[WorkloadRequest]] = {}
        for request in later:
            by_document.setdefault(document_of(request), []).append(request)
        stored = {document_of(request) for request in known}
        unknown = next(questions for document, questions in by_document.items() if document not in stored)
        send_in_order(server.base_url, server.name, unknown)  # pays what any first request of a process pays
        for document, questions in sorted(by_document.items()):
            if document not in stored or len(questions) < 2:
                continue
            answers = send_in_order(server.base_url, server.name, questions[:2])
            yield {
                "workload": workload.name,
                "arm": name,
                "document": document,
                "first_seconds": answers[0].first_token,
                "warm_seconds": answers[1].first_token,
                "first_uncached_tokens": answers[0].prompt_tokens - answers[0].cached_tokens,
                "warm_uncached_tokens": answers[1].prompt_tokens - answers[1].cached_tokens,
            }
        servers.stop()
