"""Prefixes of a made-up tree, as the server would hand them to the ledger."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance.placement.ledger.ledger import Ledger
from sgl_importance.placement.ledger.ledger_place import LedgerPlace
from sgl_importance.placement.ledger.prefix_record import PrefixRecord
from sgl_importance.reuse.reuse_class import BlockType

PAGE = 4
MODEL = b"m" * 32
NAMESPACE = (None, None)
ROOT = root_digest(*NAMESPACE)


def open_ledger(place: LedgerPlace, model: bytes = MODEL, **settings) -> Ledger:
    return Ledger(place, model, page_size=PAGE, **settings)


def make_earlier(ledger: Ledger, version: int) -> None:
    """Makes it one of an earlier schema."""
    if version < 3:
        ledger.database.execute("ALTER TABLE models DROP COLUMN life_tables")
        ledger.database.execute(
            "UPDATE format SET reuse_layout = replace(reuse_layout, 'x 51 age', 'x 42 age')"
        )
    if version < 2:
        ledger.database.execute("DROP TABLE pins")
    if isinstance(ledger.place, Path):
        ledger.database.execute(f"PRAGMA user_version = {version}")
    else:
        ledger.database.execute("UPDATE schema_version SET version = ?", (version,))


def record(
    tokens: Sequence[int],
    *,
    after: PrefixRecord | None = None,
    root: bytes = ROOT,
    last_access: int = 0,
    accesses: int = 0,
    span: int = 0,
    at_risk_as: int | None = 0,
) -> PrefixRecord:
    parent = after.digest if after else root
    return PrefixRecord(
        digest=chain_digests(parent, tokens, PAGE)[-1],
        parent=parent,
        depth=after.depth + after.tokens if after else 0,
        tokens=len(tokens),
        token_ids=tuple(tokens),
        page_digests=None,
        vectors=np.arange(len(tokens) // PAGE * 8, dtype=np.float64).reshape(-1, 8),
        queries=3,
        accesses=accesses,
        span=span,
        block_type=BlockType.USER,
        at_risk_as=at_risk_as,
        last_access=last_access,
        used=1e9 + last_access,
        in_storage=False,
    )


def random_tree(rng: random.Random, nodes: int) -> list[PrefixRecord]:
    """Parents before children."""
    records: list[PrefixRecord] = []
    for number in range(nodes):
        after = rng.choice(records) if records and rng.random() < 0.8 else None
        tokens = [number + 1, *(rng.randrange(1000) for _ in range(PAGE * rng.randint(1, 4) - 1))]
        records.append(record(tokens, after=after, last_access=rng.randrange(100), accesses=rng.randrange(9)))
    return records
