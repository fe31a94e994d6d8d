"""The decode steps that CUDA graphs replay: memory for each number of rows, filled before each replay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from sgl_importance_kernels.sparse.open_pages import StepPlan
from sgl_importance_kernels.sparse.page_choice import ChoiceRule, Contexts
from sgl_importance_kernels.sparse.page_chooser import PageChooser
from sgl_importance_kernels.sparse.upload import upload
from sglang_importance.sparse.decode_step import DecodeStep, Span

_OF_CONTEXTS = ("num_tokens", "max_pages", "num_before")


class CapturedSteps:
    """Steps whose rows all choose, among as many pages as their contexts have at most.

    A row that reads everything chooses as many pages as it has: it reads the same ones in the same order.

    Args:
        chooser: of the pages.
        max_rows: of a step.
        most_pages: of a row's context.
        max_pages: largest budget of a row.
        page_size: tokens per page.
        device: where the memory is.
    """

    def __init__(
        self,
        chooser: PageChooser,
        max_rows: int,
        most_pages: int,
        max_pages: int,
        page_size: int,
        device: torch.device | str,
    ) -> None:
        self._chooser = chooser
        self.most_pages = most_pages
        self._most_chosen = _most_chosen(chooser.rule, most_pages, max_pages, page_size)
        self._page_size = page_size
        self._pages = torch.zeros(max_rows, most_pages, dtype=torch.int64, device=device)
        self._captured: dict[int, tuple[DecodeStep, StepPlan]] = {}

    def holds(self, num_pages: int, max_pages: int) -> bool:
        """Whether a row with so many pages may read so many of them."""
        return num_pages <= self.most_pages and min(num_pages, max_pages) - 1 <= self._most_chosen

    def capture(self, plan: StepPlan) -> DecodeStep:
        """The step that a graph of as many rows as ``plan`` is captured with; both are filled later."""
        rows = len(plan.pages)
        pages, ones = self._pages[:rows], torch.ones_like(plan.pages)
        contexts = Contexts(pages, ones.clone(), ones.clone(), self._most_chosen, self._page_size)
        step = DecodeStep(
            spans=(),
            rows=torch.arange(rows, device=pages.device),
            everything=pages,
            last_tokens=ones,
            contexts=contexts,
        )
        self._captured[rows] = step, plan
        return step

    def fill(self, rows: int, spans: Sequence[Span], table: torch.Tensor, plan: StepPlan) -> Sequence[int]:
        """Fills the step of so many rows with spans of a row each, in order; those behind them are padding.

        Args:
            rows: of the graph.
            spans: for which ``holds``.
            table: pages of their requests in order, int64 [spans, most pages]; anything behind.
            plan: where the new tokens go.

        Returns:
            How many pages each span reads.
        """
        step, captured_plan = self._captured[rows]
        assert step.contexts is not None
        padding = rows - len(spans)
        counts = [len(span.pages) for span in spans] + [0] * padding
        tokens = [span.context for span in spans] + [1] * padding
        budgets = [_budget(span) for span in spans] + [1] * padding
        num_pages, last_tokens = upload(
            [counts, [(count - 1) % self._page_size + 1 for count in tokens]], table.device
        )
        at = torch.arange(table.shape[1], device=table.device)
        pages = torch.where(at < num_pages[:, None], pad(table, (0, 0, 0, padding)), 0)
        contexts = self._chooser.contexts(pages, tokens, budgets)
        assert contexts.most_chosen <= self._most_chosen, "a row would be chosen too many pages"
        step.contexts.pages[:, : pages.shape[1]] = pages  # nobody looks at what lies behind
        for name in _OF_CONTEXTS:
            getattr(step.contexts, name).copy_(getattr(contexts, name))
        step.last_tokens.copy_(last_tokens)
        for name, nothing in (("pages", -1), ("offsets", 0), ("frames", -1), ("is_reopened", False)):
            getattr(captured_plan, name).copy_(pad(getattr(plan, name), (0, padding), value=nothing))
        return contexts.num_read[: len(spans)]


def _budget(span: Span) -> int:
    return len(span.pages) if span.choice is None else min(span.choice.max_pages, len(span.pages))


def _most_chosen(rule: ChoiceRule, most_pages: int, max_pages: int, page_size: int) -> int:
    """Pages before the last that a row reads at most."""
    # The window reaches furthest back where the last page holds one token.
    forced = rule.num_forced((most_pages - 1) * page_size + 1, page_size)
    return min(max(max_pages - 1, forced), most_pages - 1)
