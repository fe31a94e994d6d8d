"""Measures how well the scores of earlier queries anticipate the top pages of a later one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from sgl_importance_lab.study.documents import SharedContext, shared_contexts
from sgl_importance_lab.study.recording import Query, Recording, Scores
from sgl_importance_lab.study.statistics import Floats, top_pages

WANTED_SHARE = 0.1
FOUND_SHARE = 0.2
MIN_PAGES = 10
BURN_IN_QUERIES = 5

Vector = Callable[[Query], Scores]


@dataclass(slots=True)
class Setting:
    """The result of one setting for each query; by request id, so that settings can be paired.

    Attributes:
        recall: share of the query's top pages among the top pages of the queries before it.
        own: whether the query's own top pages hold the answer to what it asks.
        earlier: whether the top pages of the queries before it do.
    """

    name: str
    value: str
    recall: dict[str, float] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=dict)
    earlier: dict[str, float] = field(default_factory=dict)


def step_scores(query: Query, quantity: str, interval: int = 1) -> Scores:
    """Prefill and decode in equal shares, from single steps, of which decode has every ``interval``-th."""
    total = np.zeros(0)
    phases = [steps for steps in (query.prefill, query.decode[::interval]) if steps]
    for steps in phases:
        tokens = sum(step.query_tokens for step in steps)
        for step in steps:
            vector = getattr(step, quantity).astype(np.float64)
            if len(vector) > len(total):
                total = np.pad(total, (0, len(vector) - len(total)))
            total[: len(vector)] += vector * step.query_tokens / tokens / len(phases)
    return total


def merged(scores: Floats, factor: int, *, largest: bool = False) -> Floats:
    """Scores of pages ``factor`` times as large: sums, or the largest; without an incomplete last page."""
    whole = scores.shape[-1] // factor * factor
    grouped = scores[..., :whole].reshape(*scores.shape[:-1], -1, factor)
    result: Floats = grouped.max(axis=-1) if largest else grouped.sum(axis=-1)
    return result


def histories(predictors: Floats, half_life: float) -> Floats:
    """Sums over the queries before each query, the latest weighing most.

    Args:
        predictors: float64 [queries, pages].
        half_life: in queries.

    Returns:
        The same shape; zeros for the first query.
    """
    decay = 0.5 ** (1 / half_life)
    before = np.zeros_like(predictors)
    for index in range(1, len(predictors)):
        before[index] = before[index - 1] * decay + predictors[index - 1]
    return before


def recall(history: Floats, target: Floats) -> float:
    """Share of a query's top pages among the top pages of the queries before it; both float64 [pages]."""
    wanted = top_pages(target, WANTED_SHARE)
    return len(wanted & top_pages(history, FOUND_SHARE)) / len(wanted)


class Contexts:
    """Shared contexts of the base recording; recall is always of its own queries' top pages."""

    def __init__(self, recording: Recording, min_queries: int, answers: Mapping[str, int]) -> None:
        self._answers = answers
        usable = [query for query in recording.queries if query.folds]
        self.recording = recording
        self.half_life = float(recording.header.options["half_life_queries"])
        self._contexts = shared_contexts(usable, min_queries=min_queries, min_pages=MIN_PAGES)

    def rids(self) -> list[str]:
        """Requests that are looked at."""
        return [query.rid for context in self._contexts for query in context.queries]

    def measure(
        self,
        name: str,
        value: str,
        predictor: Vector = Query.body,
        *,
        half_life: float | None = None,
        factor: int = 1,
    ) -> Setting:
        """Recall of one setting.

        Args:
            name: of the setting.
            value: of the setting.
            predictor: one query's scores as later ones see them, one number per page of the base recording.
            half_life: in queries; that of the recording where None.
            factor: pages that are looked at as one.
        """
        setting = Setting(name, value)
        for context in self._contexts:
            if len(context.pages) // factor < MIN_PAGES:
                continue
            predictors = merged(_matrix(context, predictor), factor)
            targets = merged(_matrix(context, Query.body), factor)
            before = histories(predictors, half_life or self.half_life)
            page_tokens = self.recording.page_size * factor
            for index in range(BURN_IN_QUERIES, len(context.queries)):
                rid = context.queries[index].rid
                setting.recall[rid] = recall(before[index], targets[index])
                page = self._answers.get(rid, -1) // page_tokens
                if 0 <= page < predictors.shape[1]:
                    setting.own[rid] = float(page in top_pages(predictors[index], WANTED_SHARE))
                    setting.earlier[rid] = float(page in top_pages(before[index], FOUND_SHARE))
        return setting


def _matrix(context: SharedContext, vector: Vector) -> Floats:
    pages = len(context.pages)
    rows = [vector(query)[:pages] for query in context.queries]
    return np.array([np.pad(row, (0, pages - len(row))) for row in rows])
