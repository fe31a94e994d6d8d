"""Pre-warms of a server that runs."""

from __future__ import annotations

from typing import Any

from support.servers import ServerProcess
from support.waiting import wait_until

PATH = "/kv_importance/prewarm"


def ended(server: ServerProcess, job_id: str | None = None) -> dict[str, Any]:
    """The job, or the server's own at its start, once it has ended."""
    found: list[dict[str, Any]] = []

    def has_ended() -> bool:
        jobs = server.get(PATH)["jobs"]
        found[:] = [job for job in jobs if (job["job_id"] == job_id if job_id else job["origin"] == "start")]
        return bool(found) and found[0]["state"] != "running"

    wait_until(has_ended, look_every=0.1)
    return found[0]
