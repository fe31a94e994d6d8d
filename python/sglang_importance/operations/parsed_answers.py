"""What the HTTP process has parsed out of answers."""

from __future__ import annotations

from sgl_importance.metrics_table import FaultPlace
from sgl_importance.reuse.answer_end import AnswerEnd
from sglang_importance.cache.importance_cache import ImportanceRadixCache
from sglang_importance.operations.job import Document


def answered(cache: ImportanceRadixCache, arguments: Document) -> Document:
    """``ends``: number of an AnswerEnd by id of a finished request. An unknown id is no error."""
    component = cache.importance
    for rid, end in arguments["ends"].items():
        component.state.faults.learn(FaultPlace.LEARNING, component.requests.told, rid, AnswerEnd(end))
    return {}
