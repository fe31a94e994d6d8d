"""What a running server has written into its recording by now; a thread of its own writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_importance.trace.reader import open_trace
from sgl_importance.trace.records import Record, RequestAdmitted


def records_about(directory: Path, replies: Sequence[dict[str, Any]]) -> list[Record]:
    """Records of the requests behind some answers, in the order in which they were written."""
    records = list(open_trace(directory))
    rids = {reply["meta_info"]["id"] for reply in replies}
    asked = {each.request for each in records if isinstance(each, RequestAdmitted) and each.rid in rids}
    return [each for each in records if getattr(each, "request", None) in asked]
