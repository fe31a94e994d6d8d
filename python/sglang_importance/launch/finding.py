"""One thing that `sgl-importance doctor` looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what was looked at.
        status: ``problem`` stops a server, or keeps it from doing what it is for; ``note`` does not.
        detail: what was found.
        cure: what to do; empty where nothing is wrong.
    """

    subject: str
    status: Status
    detail: str
    cure: str = ""
