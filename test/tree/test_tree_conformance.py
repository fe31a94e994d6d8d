"""The real tree with its ghosts keeps the specification of an accumulator."""

from __future__ import annotations

from array import array

import numpy as np

from sgl_importance.interface import Importance
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.observation_options import SignalOptions
from sgl_importance_lab.conformance.cases import ConsumerCase, Observed, ServedQuery
from sgl_importance_lab.conformance.check import check_accumulator
from sglang_importance.attention.rows import Phase, RowScores

from support.drivers.tree_driver import Request, TreeDriver

POOL_TOKENS = 256


class DrivenTree:
    """An accumulator: sglang's tree, driven as its scheduler does."""

    def __init__(self, case: ConsumerCase, monkeypatch) -> None:
        options = ImportanceOptions(
            policy="importance", signal=SignalOptions(half_life_queries=case.half_life_queries)
        )
        self._driver = TreeDriver(tokens=POOL_TOKENS, page_size=case.page_size, options=options)
        self._queries = 0

    def serve(self, query: ServedQuery) -> None:
        driver = self._driver
        self._queries += 1
        request = Request(
            str(self._queries),
            array("q", query.prompt),
            extra_key=query.extra_key,
            cache_salt=query.cache_salt,
        )
        driver._match_and_lock(request)
        self._put(request, Phase.PREFILL, query.prefill)
        driver.prefill(request)
        if query.generated:
            driver.decode(request, query.generated)
        self._put(request, Phase.DECODE, query.decode)
        driver.finish(request)

    def _put(self, request: Request, phase: Phase, observed: Observed | None) -> None:
        if observed is not None:
            body = np.array(observed.body_mass)
            self._driver.rows.scores[request.slot, phase] = RowScores(body, observed.peak, 1)

    def evict_all(self) -> None:
        self._driver.evict(POOL_TOKENS)
        assert not list(self._driver.component.state.tree.nodes())

    def get_importance(self, key: bytes) -> Importance | None:
        return self._driver.cache.get_importance(key)


def test_the_tree_and_its_ghosts_conform(monkeypatch):
    verdicts = check_accumulator(lambda case: DrivenTree(case, monkeypatch))
    assert [verdict for verdict in verdicts if not verdict.passed] == []
    assert len(verdicts) >= 10
