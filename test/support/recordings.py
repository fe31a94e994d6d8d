"""Recordings of a server that still runs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from sgl_importance.observe.trace.reader import open_trace
from sgl_importance.observe.trace.records import RequestAdmitted, RequestFinished

from support.waiting import wait_until


def wait_until_recorded(trace: Path, rids: Collection[str]) -> None:
    """Until the ends of these requests are written, and what came before: a thread writes behind the answers.

    What a server asks itself is recorded, too: to count requests would not do.
    """

    def are_written() -> bool:
        records = list(open_trace(trace))
        names = {record.request: record.rid for record in records if isinstance(record, RequestAdmitted)}
        ended = {names.get(record.request) for record in records if isinstance(record, RequestFinished)}
        return ended.issuperset(rids)

    wait_until(are_written, look_every=0.1)
