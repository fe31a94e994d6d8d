"""Which tokens of each request read chosen pages, and what came of it."""

from __future__ import annotations

from weakref import WeakValueDictionary

from sglang.srt.managers.schedule_batch import Req

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.sparse.selection_rule import Selection, read_all, selection_rule
from sglang_importance.upstream.request_record import record_of


class Selections:
    """The selections of all requests. A request holds its own, which goes with it.

    Args:
        options: what the operator chose for requests that say nothing.
        page_size: tokens per page.
    """

    def __init__(self, options: ImportanceOptions, page_size: int) -> None:
        self._options = options
        self._page_size = page_size
        # Of a request in a batch that nobody opened, such as a warm-up.
        self._unopened = Selection(read_all(page_size))
        self._by_rid: WeakValueDictionary[str, Selection] = WeakValueDictionary()

    def of(self, rid: str) -> Selection:
        """The selection of a request in a batch; one that nobody opened reads all."""
        return self._by_rid.get(rid, self._unopened)

    def open(self, req: Req, *, reads_all: bool, budget: float | None) -> Selection:
        """Gives a request its selection.

        Args:
            reads_all: whether no token of it selects.
            budget: as in ``SelectionRule``; None for the server's.
        """
        if reads_all:
            rule = read_all(self._page_size)
        else:
            rule = selection_rule(
                prompt_tokens=len(req.origin_input_ids),
                selecting_prompt_tokens=self._options.sparse.prompt_tokens,
                min_context_tokens=self._options.sparse.min_context,
                budget=self._options.sparse.budget if budget is None else budget,
                page_size=self._page_size,
            )
        selection = Selection(rule)
        record_of(req).selection = selection
        self._by_rid[req.rid] = selection
        return selection
