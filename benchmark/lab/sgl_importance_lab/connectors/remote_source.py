"""A server's importance for consumers in other processes: answers are fetched in batches and kept."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Any

from sgl_importance.cli.server_client import Server, ServerError
from sgl_importance.interface import SCHEMA_VERSION, Importance, SignalKind
from sgl_importance.nodes.digests import DIGEST_BYTES

__all__ = ["RemoteSource"]

BATCH_KEYS = 4096  # what the server answers at once
DEFAULT_MAX_PAGES = 2**16


class RemoteSource:
    """Answers ``get_importance`` from what the last ``refresh`` brought.

    A look-up never touches the network: a page that was not fetched yet is unknown, and is asked for with the
    next ``refresh``, which belongs on a thread of its own. Pages that nobody looks up any more are
    forgotten first.

    Args:
        server: where pages are known.
        max_pages: pages to remember.
    """

    def __init__(self, server: Server, *, max_pages: int = DEFAULT_MAX_PAGES) -> None:
        self._server = server
        self._max_pages = max_pages
        self._known: dict[bytes, Importance] = {}
        self._wanted: OrderedDict[bytes, None] = OrderedDict()

    def get_importance(self, key: bytes) -> Importance | None:
        """As ``sgl_importance.interface.ImportanceSource``, as old as the last ``refresh``."""
        if len(key) != DIGEST_BYTES:
            return None  # the server would refuse the whole batch
        self._wanted[key] = None
        self._wanted.move_to_end(key)
        if len(self._wanted) > self._max_pages:
            self._wanted.popitem(last=False)
        return self._known.get(key)

    def refresh(self) -> int:
        """Asks for every page that was looked up; how many are known now.

        Raises:
            ServerError: the server is not there or refused, has several data-parallel ranks, or speaks
                another version; nothing is changed.
        """
        # list() of a dict is one step for Python: look-ups may go on on another thread.
        keys = iter(list(self._wanted))
        known: dict[bytes, Importance] = {}
        while batch := list(islice(keys, BATCH_KEYS)):
            document = self._server.post("/importance", {"keys": [key.hex() for key in batch]})
            if "dp_ranks" in document:
                raise ServerError(
                    f"{self._server.url} has several data-parallel ranks, each with a tree of its own: "
                    "name a server that has one"
                )
            if document.get("version") != SCHEMA_VERSION:
                raise ServerError(
                    f"{self._server.url} speaks version {document.get('version')} of the specification, "
                    f"not {SCHEMA_VERSION}: use the sgl-importance of the server"
                )
            for key, answer in zip(batch, document["importance"], strict=True):
                if answer is not None:
                    known[key] = _importance(answer)
        self._known = known
        return len(known)


def _importance(answer: dict[str, Any]) -> Importance:
    fields = Importance.__dataclass_fields__
    values = {name: answer[name] for name in fields}
    return Importance(**{**values, "kind": SignalKind(values["kind"])})
