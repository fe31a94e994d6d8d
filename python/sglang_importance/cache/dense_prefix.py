"""Keeps what was computed from chosen pages out of the tree: whatever a cache hit gives is exact."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

from sgl_importance.sparse.selection_rule import Selection, SelectionRule
from sglang_importance.placement.hint_follower import hints_of
from sglang_importance.placement.prewarm_request import is_prewarm
from sglang_importance.sparse.selections import Selections
from sglang_importance.upstream.request_record import record_of


class DensePrefix:
    """How much of a request is computed from all pages of its context.

    Keys and values of a token that read chosen pages only differ from exact ones in every layer but the
    first, and so do those of all tokens behind it. None of them enters the tree, and so none enters host or
    storage: every page that is found there may serve every request.

    Args:
        selections: where the rules of requests are kept.
    """

    def __init__(self, selections: Selections) -> None:
        self._selections = selections

    def limit(self, params: MatchPrefixParams) -> MatchPrefixParams:
        """The part of a key that may be found: a token that selects does so whether it is cached or not."""
        if params.req is None:
            return params
        first = self._rule(params.req).first
        key = params.key
        return params if len(key) <= first else replace(params, key=key[:first])

    def insertable(self, req: Req, found_tokens: int) -> int:
        """Tokens of a request that may enter the tree.

        Args:
            found_tokens: what it got from the tree.
        """
        return max(self._rule(req).first, found_tokens)

    def _rule(self, req: Req) -> SelectionRule:
        return (record_of(req).selection or self._open(req)).rule

    def _open(self, req: Req) -> Selection:
        hints = hints_of(req)
        if hints is None:
            return self._selections.open(req, reads_all=is_prewarm(req.rid), budget=None)
        reads_all = hints.selector == "all" or hints.prefetch
        return self._selections.open(req, reads_all=reads_all, budget=hints.budget)
