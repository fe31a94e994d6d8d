"""A stand-in for Mooncake's client: the answers that 0.3.13 gives, in memory of this process."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

NO_SPACE, UNREACHABLE, NOT_FOUND, LEASED = -200, -900, -704, -706


class StandInStore:
    """One store, as every client of it sees it.

    Attributes:
        records: by key.
        is_down: nothing answers, as when the master is killed.
        room: bytes that it takes; None for any number.
    """

    _stores: ClassVar[dict[Path, StandInStore]] = {}

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.is_down = False
        self.room: int | None = None

    @classmethod
    def at(cls, folder: Path) -> StandInStore:
        """The same for the same folder, as a client finds it that connects again."""
        return cls._stores.setdefault(folder, cls())

    def upsert(self, key: str, value: memoryview) -> int:
        if self.is_down:
            return UNREACHABLE
        held = sum(len(record) for name, record in self.records.items() if name != key)
        if self.room is not None and held + value.nbytes > self.room:
            return NO_SPACE
        self.records[key] = bytes(value)
        return 0

    def get(self, key: str) -> bytes:
        return b"" if self.is_down else self.records.get(key, b"")

    def remove(self, key: str, force: bool) -> int:
        if self.is_down:
            return UNREACHABLE
        if key not in self.records:
            return NOT_FOUND
        if not force:
            return LEASED
        del self.records[key]
        return 0

    def is_exist(self, key: str) -> int:
        return UNREACHABLE if self.is_down else int(key in self.records)

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [self.is_exist(key) for key in keys]

    def close(self) -> int:
        return 0
