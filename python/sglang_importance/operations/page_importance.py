"""What another process asks of a scheduler about pages: ``get_importance`` over HTTP."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sgl_importance.interface import SCHEMA_VERSION
from sglang_importance.operations.runner import Document, Job

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_importance.tree.annotated_tree import AnnotatedTree

MAX_KEYS = 4096
KEYS_PER_SLICE = 256  # one to two milliseconds


def importance(scheduler: Scheduler, arguments: dict[str, Any]) -> Job:
    """What is known of the pages ``keys`` (chained digests, hexadecimal), in order; None where unknown."""
    tree: AnnotatedTree = scheduler.tree_cache.importance.tree
    return _importance(tree, [bytes.fromhex(key) for key in arguments["keys"]])


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
