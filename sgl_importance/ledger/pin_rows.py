"""Pins in the ledger's file, where requested pins outlive the server.

A row is written when its pin is made and deleted when it ends, so servers that share a file never overwrite
each other's.
"""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from sgl_importance.pins.pin import Pin

MAX_SHARE = 0.25
"""Of the ledger's budget; what pins take beyond it is not kept."""
_ROW_BYTES = 200  # of a row without its tokens, with its part of the index


class PinRows:
    """The pins of one model in a ledger's file. Used by the ledger's thread.

    Args:
        connection: to the file.
        model: number of the model.
    """

    def __init__(self, connection: sqlite3.Connection, model: int) -> None:
        self._connection = connection
        self._model = model
        self.damaged = 0

    @property
    def num_bytes(self) -> int:
        """Of the pins of every model."""
        (size,) = self._connection.execute(
            f"SELECT sum(length(tokens) + length(names) + {_ROW_BYTES}) FROM pins"
        ).fetchone()
        return int(size or 0)

    def read(self, now: float, *, page_size: int) -> list[Pin]:
        """Pins that have not ended, oldest first; damaged rows are left out and counted.

        Args:
            now: Unix time.
            page_size: tokens per page.
        """
        rows = self._connection.execute(
            "SELECT pin_id, names, expires_at, tokens, checksum FROM pins WHERE model = ? "
            "AND (expires_at IS NULL OR expires_at > ?) ORDER BY id",
            (self._model, now),
        )
        pins = [_decode(row, page_size) for row in rows]
        self.damaged += pins.count(None)
        return [pin for pin in pins if pin is not None]

    def write(
        self, added: Iterable[Pin], ended: Collection[str], *, now: float, budget_bytes: int
    ) -> set[str]:
        """Makes the file agree with the server, in one transaction; also deletes expired pins.

        Args:
            added: pins that are not in the file, oldest first.
            ended: names of pins that are.
            now: Unix time.
            budget_bytes: of the ledger.

        Returns:
            Names of the added pins that are kept; there is no room for others.

        Raises:
            sqlite3.Error: nothing has changed.
        """
        execute = self._connection.execute
        kept = set()
        execute("BEGIN IMMEDIATE")
        try:
            execute("DELETE FROM pins WHERE expires_at <= ?", (now,))
            for pin_id in ended:
                execute("DELETE FROM pins WHERE model = ? AND pin_id = ?", (self._model, pin_id))
            room = int(MAX_SHARE * budget_bytes) - self.num_bytes
            for pin in added:
                row = _encode(pin)
                num_bytes = len(row[1]) + len(row[3]) + _ROW_BYTES
                if num_bytes > room:
                    continue
                room -= num_bytes
                execute(
                    "INSERT OR REPLACE INTO pins (model, pin_id, names, expires_at, tokens, checksum) "
                    "VALUES (?, ?, ?, ?, ?, ?)",
                    (self._model, *row),
                )
                kept.add(pin.pin_id)
            execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                execute("ROLLBACK")
            raise
        return kept


def _encode(pin: Pin) -> tuple[Any, ...]:
    names = json.dumps((pin.extra_key, pin.cache_salt))
    expires_at = None if pin.expires_at is None else float(pin.expires_at)
    values = (pin.pin_id, names, expires_at, np.asarray(pin.tokens, dtype="<i4").tobytes())
    return (*values, _checksum(values))


def _decode(row: tuple[Any, ...], page_size: int) -> Pin | None:
    *values, checksum = row
    pin_id, names, expires_at, tokens = values
    try:
        if checksum != _checksum(values) or not tokens or len(tokens) % (4 * page_size):
            return None
        extra_key, cache_salt = json.loads(names)
        ids = array("q", np.frombuffer(tokens, dtype="<i4").astype(np.int64).tobytes())
        return Pin(pin_id, ids, extra_key, cache_salt, expires_at)
    except (TypeError, ValueError):
        return None


def _checksum(values: Iterable[Any]) -> int:
    # SQLite's integers are signed.
    return xxh3_64_intdigest(repr(tuple(values)).encode()) - 2**63
