"""Which tokens of each request read chosen pages: known to its attention and to the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from sgl_importance.options import ImportanceOptions
from sgl_importance.pages.selection_rule import SelectionRule, read_all, selection_rule

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

RULE_ATTRIBUTE = "importance_selection"


class Selections:
    """The rules of requests. A request holds its own, which goes with it.

    Args:
        options: what the operator chose for requests that say nothing.
        page_size: tokens per page.
    """

    def __init__(self, options: ImportanceOptions, page_size: int) -> None:
        self._options = options
        self._page_size = page_size
        self._read_all = read_all(page_size)
        self._by_rid: WeakValueDictionary[str, SelectionRule] = WeakValueDictionary()

    def of(self, rid: str) -> SelectionRule:
        """The rule of a request in a batch. One that nobody opened, such as a warm-up, reads all."""
        return self._by_rid.get(rid, self._read_all)

    def opened(self, req: Req) -> SelectionRule | None:
        """The rule of a request; None before ``open``."""
        rule: SelectionRule | None = getattr(req, RULE_ATTRIBUTE, None)
        return rule

    def open(self, req: Req, *, reads_all: bool, budget: float | None) -> SelectionRule:
        """Gives a request its rule.

        Args:
            reads_all: whether no token of it selects.
            budget: as in ``SelectionRule``; None for the server's.
        """
        if reads_all:
            rule = read_all(self._page_size)
        else:
            rule = selection_rule(
                prompt_tokens=len(req.origin_input_ids),
                selecting_prompt_tokens=self._options.sparse_prompt_tokens,
                min_context_tokens=self._options.sparse_min_context,
                budget=self._options.sparse_budget if budget is None else budget,
                page_size=self._page_size,
            )
        setattr(req, RULE_ATTRIBUTE, rule)
        self._by_rid[req.rid] = rule
        return rule
