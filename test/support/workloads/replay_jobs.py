"""Jobs that other processes run: they import this module, and could not import a test."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from sgl_importance_lab.replay.replay_runner import Job, Row
from sgl_importance_lab.replay.trace import Trace


def die(traces: Sequence[Trace], job: Job) -> Row:
    os._exit(9)


def sleep(traces: Sequence[Trace], job: Job) -> int:
    """Sleeps as many seconds as the job's capacity, and then writes them into the file that is its policy."""
    time.sleep(job.capacity)
    with Path(job.policy).open("a") as done:
        done.write(f"{job.capacity}\n")
    return job.capacity
