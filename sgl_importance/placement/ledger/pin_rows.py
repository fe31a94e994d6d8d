"""Pins in the ledger, where requested pins outlive the server.

A row is written when its pin is made and deleted when it ends, so servers that share a ledger never
overwrite each other's.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from sgl_importance.placement.ledger.ledger_database import LedgerDatabase
from sgl_importance.placement.pins.pin import Pin

MAX_SHARE = 0.25
"""Of the ledger's budget; what pins take beyond it is not kept."""
_ROW_BYTES = 200  # of a row without its tokens, with its part of the index
_UPSERT = (
    "INSERT INTO pins (model, pin_id, names, expires_at, tokens, checksum) VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (model, pin_id) DO UPDATE SET names = excluded.names, expires_at = excluded.expires_at, "
    "tokens = excluded.tokens, checksum = excluded.checksum"
)


class PinRows:
    """The pins of one model in a ledger. Used by the ledger's thread.

    Args:
        database: of the ledger.
        model: number of the model.
    """

    def __init__(self, database: LedgerDatabase, model: int) -> None:
        self._database = database
        self._model = model
        self.damaged = 0

    @property
    def num_bytes(self) -> int:
        """Of the pins of every model."""
        ((size,),) = self._database.execute(
            f"SELECT sum(length(tokens) + length(names) + {_ROW_BYTES}) FROM pins"
        )
        return int(size or 0)

    def read(self, now: float, *, page_size: int) -> list[Pin]:
        """Pins that have not ended, oldest first; damaged rows are left out and counted.

        Args:
            now: Unix time.
            page_size: tokens per page.
        """
        rows = self._database.execute(
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
        """Makes the ledger agree with the server, in one transaction; also deletes expired pins.

        Args:
            added: pins that are not in the ledger, oldest first.
            ended: names of pins that are.
            now: Unix time.
            budget_bytes: of the ledger.

        Returns:
            Names of the added pins that are kept; there is no room for others.

        Raises:
            LedgerError: nothing has changed.
        """
        execute = self._database.execute
        kept = set()
        with self._database.transaction(alone=True):
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
                execute(_UPSERT, (self._model, *row))
                kept.add(pin.pin_id)
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
        extra_key, cache_salt = namespace = json.loads(names)
        for name in namespace:
            str.encode(name or "")  # no answer of a server could name half a surrogate pair
        ids = array("q", np.frombuffer(tokens, dtype="<i4").astype(np.int64).tobytes())
        return Pin(pin_id, ids, extra_key, cache_salt, expires_at)
    except (TypeError, ValueError):
        return None


def _checksum(values: Iterable[Any]) -> int:
    # SQLite's integers are signed.
    return xxh3_64_intdigest(repr(tuple(values)).encode()) - 2**63
