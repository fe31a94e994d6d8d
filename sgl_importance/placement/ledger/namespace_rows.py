"""Namespaces in the ledger: extra key and cache salt behind a root digest, for as long as a prefix has it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sgl_importance.json_text import BadJson, read_json
from sgl_importance.nodes.digests import root_digest
from sgl_importance.placement.ledger.ledger_database import LedgerDatabase

_ROW_BYTES = 64  # of a row without its values, with its part of the index
_NUM_BYTES = f"SELECT sum(length(root) + length(names) + {_ROW_BYTES}) FROM namespaces"
_UNUSED = "WHERE root IN (SELECT root FROM namespaces EXCEPT SELECT parent FROM prefixes WHERE depth = 0)"


class NamespaceRows:
    """The namespaces of all models in a ledger. Used by the ledger's thread.

    Args:
        database: of the ledger.
    """

    def __init__(self, database: LedgerDatabase) -> None:
        self._database = database

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        ((size,),) = self._database.execute(_NUM_BYTES)
        return int(size or 0)

    @property
    def unused_bytes(self) -> int:
        """Of those in which no prefix of any model begins."""
        ((size,),) = self._database.execute(f"{_NUM_BYTES} {_UNUSED}")
        return int(size or 0)

    def sizes(self) -> dict[bytes, int]:
        """Bytes of each by its root digest."""
        rows = self._database.execute("SELECT root, length(root) + length(names) FROM namespaces")
        return {root: _ROW_BYTES + size for root, size in rows}

    def read(self) -> dict[bytes, tuple[str | None, ...]]:
        """Extra key and cache salt by root digest; damaged rows are left out."""
        rows = self._database.execute("SELECT root, names FROM namespaces")
        named = {root: _decode(names) for root, names in rows}
        return {root: names for root, names in named.items() if names and root_digest(*names) == root}

    def add(self, namespaces: Iterable[tuple[str | None, ...]]) -> int:
        """Writes those that are not there, within the transaction of their prefixes.

        What was written before is not remembered: another server may have forgotten it since.

        Returns:
            Bytes of all of them, those that were there included.

        Raises:
            LedgerError: nothing was kept.
        """
        # In one order, so that no two servers wait for each other.
        rows = sorted({(root_digest(*names), json.dumps(names)) for names in namespaces})
        self._database.execute_many("INSERT INTO namespaces VALUES (?, ?) ON CONFLICT DO NOTHING", rows)
        return sum(len(root) + len(names) + _ROW_BYTES for root, names in rows)

    def forget_unused(self) -> None:
        """Deletes those in which no prefix of any model begins, within a transaction and as its last step.

        In PostgreSQL a prefix that another server writes at this moment is not seen: its namespace may be
        gone until its next visit writes it again.

        Raises:
            LedgerError: nothing has changed.
        """
        self._database.execute(f"DELETE FROM namespaces {_UNUSED}")


def _decode(names: Any) -> tuple[str | None, ...] | None:
    """Extra key and cache salt; None where they are damaged."""
    try:
        decoded = read_json(names)
    except (BadJson, TypeError):
        return None
    is_sound = isinstance(decoded, list) and all(name is None or isinstance(name, str) for name in decoded)
    return tuple(decoded) if is_sound else None
