"""The tables of a ledger, of every version, for every database that may keep them."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_importance.reuse.life_table import NUM_AGE_BUCKETS, NUM_EXACT_BUCKETS
from sgl_importance.reuse.reuse_class import CLASSES_OF_END, visit_level

SCHEMA_VERSION = 3
_LEVELS = bytes(visit_level(2**power, 4**power) for power in range(12)).hex()
_CLASSES = f"{CLASSES_OF_END} classes (visits {_LEVELS})"
REUSE_LAYOUT = f"{_CLASSES} x {NUM_AGE_BUCKETS} age buckets"
"""Of the classes of unknown ends of answers, the only ones that earlier versions have. Classes of other ends
follow them in the evidence, if there are any."""
_SHORTER_LAYOUT = f"{_CLASSES} x {NUM_EXACT_BUCKETS} age buckets"
"""Of schemas 1 and 2, whose life tables ended at 32,768 requests."""

_PINS = """
CREATE TABLE pins (
    id {row_id},
    model {integer} NOT NULL REFERENCES models(id),
    pin_id TEXT NOT NULL,
    names TEXT NOT NULL,
    expires_at {real},
    tokens {blob} NOT NULL,
    checksum {integer} NOT NULL,
    UNIQUE (model, pin_id)
)
"""
_TABLES = f"""
CREATE TABLE format (reuse_layout TEXT NOT NULL);
INSERT INTO format VALUES ('{REUSE_LAYOUT}');
CREATE TABLE models (
    id {{row_id}},
    identity {{blob}} NOT NULL UNIQUE,
    clock {{integer}} NOT NULL DEFAULT 0,
    used {{real}} NOT NULL DEFAULT 0,
    evidence {{blob}},
    life_tables {{blob}}
);
CREATE TABLE namespaces (root {{blob}} PRIMARY KEY, names TEXT NOT NULL);
CREATE TABLE prefixes (
    model {{integer}} NOT NULL REFERENCES models(id),
    digest {{blob}} NOT NULL,
    parent {{blob}} NOT NULL,
    depth {{integer}} NOT NULL,
    tokens {{integer}} NOT NULL,
    queries {{integer}} NOT NULL,
    accesses {{integer}} NOT NULL,
    span {{integer}} NOT NULL,
    block_type {{integer}} NOT NULL,
    watched_as {{integer}},
    clock {{integer}} NOT NULL,
    used {{real}} NOT NULL,
    in_storage {{integer}} NOT NULL,
    has_token_ids {{integer}} NOT NULL,
    pages {{blob}} NOT NULL,
    vectors {{blob}} NOT NULL,
    checksum {{integer}} NOT NULL,
    PRIMARY KEY (model, digest)
);
CREATE INDEX prefixes_by_clock ON prefixes (model, clock);
{_PINS}
"""
_LIFE_TABLES = f"""
ALTER TABLE models ADD COLUMN life_tables {{blob}};
UPDATE format SET reuse_layout = '{REUSE_LAYOUT}';
"""
_UPGRADES = {1: _PINS, 2: _LIFE_TABLES}
"""From an earlier schema to the next one, while servers of the earlier one may use it. Those of schema 2 go
on with ``evidence``, in their layout; later ones begin with it, and write ``life_tables``."""


@dataclass(frozen=True, slots=True)
class ColumnTypes:
    """What a database calls the types of columns.

    Attributes:
        row_id: of a primary key that the database counts up.
        integer: of 64 bits, signed.
        real: of 64 bits.
        blob: of bytes.
    """

    row_id: str
    integer: str
    real: str
    blob: str


def steps_from(version: int, types: ColumnTypes) -> list[tuple[int, list[str]]]:
    """The statements that bring a database to ``SCHEMA_VERSION``, each version with those that lead to it.

    Args:
        version: of its schema; 0 where it has none.
        types: of its columns.

    Raises:
        KeyError: no step leads on from this version.
    """
    steps = []
    while version < SCHEMA_VERSION:
        text = _UPGRADES[version] if version else _TABLES
        version = version + 1 if version else SCHEMA_VERSION
        named = text.format(row_id=types.row_id, integer=types.integer, real=types.real, blob=types.blob)
        steps.append((version, [each.strip() for each in named.split(";") if each.strip()]))
    return steps


def version_problem(version: int) -> str | None:
    """What is wrong with a database of this schema, to follow its name; None where it can be used."""
    if version == SCHEMA_VERSION or version in _UPGRADES:
        return None
    age = "newer" if version > SCHEMA_VERSION else "older"
    return f"has schema {version}, {age} than {SCHEMA_VERSION} of this version"


def layout_problem(layout: str) -> str | None:
    """What is wrong with a database that counts reuse so, to follow its name; None where it can be used."""
    if layout in (REUSE_LAYOUT, _SHORTER_LAYOUT):
        return None
    return f"counts reuse by {layout}, not by {REUSE_LAYOUT}"
