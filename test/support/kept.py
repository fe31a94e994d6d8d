"""Waiting until a server that is killed now would leave everything to the one that starts after it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from support.servers import ServerProcess
from support.waiting import wait_until


def wait_until_kept(server: ServerProcess) -> None:
    """Of a server with a ledger that nobody asks for anything: until its ledger and its store are up to date.

    Both are written behind the answers: the ledger half a second later or, on a slow machine, some more.
    """
    wait_until(lambda: _is_stored(server))
    place = Path(server.get("/kv_importance", limit=1)["ledger"]["place"])
    wait_until(lambda: _is_in_ledger(server, place))


def _is_stored(server: ServerProcess) -> bool:
    """Whether all that was copied to the host is in storage too, where there is storage."""
    tree = server.get("/kv_importance", limit=1000)
    has_storage = tree["tiers"]["storage"]["total_tokens"] is None
    return not has_storage or all(
        "storage" in node["tiers"] for node in tree["nodes"] if "host" in node["tiers"]
    )


def _is_in_ledger(server: ServerProcess, place: Path) -> bool:
    """Whether the last request that ended is there, and the same pins."""
    clock = server.get("/kv_importance", limit=1)["clock"]
    pins = {pin["pin_id"] for pin in server.get("/kv_importance/pins")["pins"]}
    with closing(sqlite3.connect(f"{place.as_uri()}?mode=ro", uri=True)) as ledger:
        ((written,),) = ledger.execute("SELECT max(clock) FROM models")
        return written == clock and {name for (name,) in ledger.execute("SELECT pin_id FROM pins")} == pins
