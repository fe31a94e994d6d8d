"""What a ledger's rows are worth, over all models, and in which order they are forgotten."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from sgl_importance.placement.ledger.ledger_database import LedgerDatabase
from sgl_importance.placement.ledger.prefix_record import ROW_BYTES

MODEL_HALF_LIFE_SECONDS = 30 * 86400.0
"""Seconds after which rows of a model that no server loads are worth half."""

Worth = Callable[[int | None, int, int, int], float]
"""Seconds saved per KV byte, of (class, age in requests, tokens, tokens in front)."""


class ForgettableRow(NamedTuple):
    """A row in the order in which rows are forgotten.

    Attributes:
        model: number of its model.
        digest: of its last page.
        num_bytes: that go with it and with what nothing needs then, once all before it have gone.
    """

    model: int
    digest: bytes
    num_bytes: int


def least_worth(
    database: LedgerDatabase, worth: Worth, *, root_bytes: Mapping[bytes, int]
) -> Iterator[ForgettableRow]:
    """Rows of every model, least worth first: a prefix is worth no less than any continuation.

    Args:
        database: of the ledger.
        worth: ranks rows of every model, each by its own model's clock.
        root_bytes: bytes of each namespace by its root, which go with the last prefix that begins there.

    Raises:
        LedgerError: they cannot be read.
    """
    clocks = {
        model: (clock, used) for model, clock, used in database.execute("SELECT id, clock, used FROM models")
    }
    now = time.time()
    worths: dict[tuple[int, bytes], float] = {}
    rows = database.execute(
        "SELECT model, digest, parent, depth, tokens, watched_as, clock, "
        "length(pages) + length(vectors) FROM prefixes ORDER BY depth DESC"
    )
    whole = np.empty(len(rows))
    for row, (model, digest, parent, depth, tokens, at_risk_as, clock, _) in enumerate(rows):
        model_clock, used = clocks[model]
        fading = 0.5 ** (max(now - used, 0.0) / MODEL_HALF_LIFE_SECONDS)
        own = fading * worth(at_risk_as, max(model_clock - clock, 0), tokens, depth)
        whole[row] = max(own, worths.get((model, digest), 0.0))
        worths[model, parent] = max(whole[row], worths.get((model, parent), 0.0))
        if row % 32 == 0:
            let_others_run()
    beginnings = Counter(parent for _, _, parent, depth, *_ in rows if depth == 0)
    # Rows come deepest first, and a stable sort leaves those of equal worth so.
    for row in np.argsort(whole, kind="stable").tolist():
        model, digest, parent, depth, *_, blob_bytes = rows[row]
        num_bytes = blob_bytes + ROW_BYTES
        if depth == 0:
            beginnings[parent] -= 1
            num_bytes += 0 if beginnings[parent] else root_bytes.get(parent, 0)
        yield ForgettableRow(model, digest, num_bytes)


def let_others_run() -> None:
    """Releases the interpreter lock, for which the scheduler's thread would otherwise wait 5 ms."""
    time.sleep(0)
