"""The operation behind ``get_importance`` over HTTP: the importance of pages by their digests."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict

from sgl_importance.interface import SCHEMA_VERSION
from sglang_importance.cache.importance_cache import ImportanceRadixCache
from sglang_importance.operations.job import Document, Job
from sglang_importance.tree.annotated_tree import AnnotatedTree

MAX_KEYS = 4096
KEYS_PER_SLICE = 256  # one to two milliseconds


def importance(cache: ImportanceRadixCache, arguments: Document) -> Job:
    """The importance of the pages ``keys`` (chained digests, hexadecimal), in order; None where unknown."""
    return _importance(cache.importance.state.tree, [bytes.fromhex(key) for key in arguments["keys"]])


def _importance(tree: AnnotatedTree, keys: list[bytes]) -> Generator[None, None, Document]:
    while not tree.source.catch_up():
        yield
    answers: list[Document | None] = []
    for start in range(0, len(keys), KEYS_PER_SLICE):
        if start:
            yield
        for key in keys[start : start + KEYS_PER_SLICE]:
            known = tree.source.get_importance(key)
            answers.append(None if known is None else asdict(known))
    return {"version": SCHEMA_VERSION, "page_size": tree.page_size, "importance": answers}
