"""Which pages each generated token of one request wanted, as dense arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sgl_importance_lab.replay.residency.page_steps import PageRecording, PageStep
from sgl_importance_lab.study.thinking.marks import Marks

Bools = npt.NDArray[np.bool_]
Floats32 = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Wants:
    """The generated tokens of one request, in their order. A head is one KV head of one layer.

    Attributes:
        rid: of the request.
        page_size: tokens of a page.
        first_page: of the sequence, that column 0 stands for; the prompt's are before it in ``of_answer``.
        prompt_pages: columns that hold tokens of the prompt.
        num_pages: columns that exist at each step; int64 [steps]. The last one is being filled.
        wanted: whether a page is among those of largest attention mass; [steps, heads, columns].
        mass: attention on each page, the same shape. 0 for pages that were not listed.
        milestones: columns that hold a milestone; bool [columns], None where nobody knows.
        layer_heads: KV heads of a layer; those of the first layer come first.
        margins: by how much the logit of the likeliest next token is above that of the second, behind each
            step; float32 [steps], None where nobody knows.
    """

    rid: str
    page_size: int
    first_page: int
    prompt_pages: int
    num_pages: Counts
    wanted: Bools
    mass: Floats32
    layer_heads: int = 1
    milestones: Bools | None = None
    margins: Floats32 | None = None

    @property
    def num_steps(self) -> int:
        return len(self.num_pages)

    @property
    def num_heads(self) -> int:
        return int(self.wanted.shape[1])

    @property
    def kind(self) -> str:
        """Kind of workload, from a request id "kind/..."."""
        kind, slash, _ = self.rid.partition("/")
        return kind if slash else "recorded"

    def exists(self, steps: slice = slice(None)) -> Bools:
        """Whether a column is a page yet; [steps, 1, columns]."""
        columns = np.arange(self.wanted.shape[2])
        return (columns < self.num_pages[steps, None])[:, None, :]

    def of_answer(self) -> Wants:
        """The same without the prompt's pages, for rules that keep all of these."""
        first = self.prompt_pages
        return replace(
            self,
            first_page=self.first_page + first,
            prompt_pages=0,
            num_pages=np.maximum(self.num_pages - first, 0),
            wanted=self.wanted[:, :, first:],
            mass=self.mass[:, :, first:],
            milestones=None if self.milestones is None else self.milestones[first:],
        )

    def steps(self, chosen: Counts) -> Wants:
        """Some of its steps alone."""
        return replace(
            self,
            num_pages=self.num_pages[chosen],
            wanted=self.wanted[chosen],
            mass=self.mass[chosen],
            margins=None if self.margins is None else self.margins[chosen],
        )

    def check_integrity(self) -> None:
        """Raises AssertionError where the arrays do not belong together."""
        assert self.wanted.shape == self.mass.shape
        assert len(self.num_pages) == len(self.wanted)
        assert self.milestones is None or self.milestones.shape == self.wanted.shape[2:]
        assert self.margins is None or len(self.margins) == len(self.wanted)
        assert (np.diff(self.num_pages) >= 0).all(), "a sequence became shorter"
        assert not (self.wanted & ~self.exists()).any(), "a page is wanted that is not there yet"


def read_wants(
    recording: PageRecording, share: float, shortest: int, marks: Mapping[str, Marks] | None = None
) -> Iterator[Wants]:
    """The requests of a recording with at least ``shortest`` generated tokens.

    Args:
        recording: with lists of at least ``share`` of each context.
        share: of the pages of a context at each step that count as wanted, by each head.
        shortest: steps.
        marks: by request id, where they are known.
    """
    by_request: dict[int, dict[int, PageStep]] = {}
    for step in recording.steps:
        if step.is_generated and not step.is_behind:
            # A request that was retracted lists some tokens twice.
            by_request.setdefault(step.request, {})[step.seq_len] = step
    for request, found in by_request.items():
        if len(found) >= shortest:
            listed = recording.requests[request]
            steps = [found[seq_len] for seq_len in sorted(found)]
            prompt_pages = -(-listed.input_tokens // recording.page_size)
            wants = _dense(listed.rid, prompt_pages, steps, recording, share)
            of_request = (marks or {}).get(listed.rid)
            yield wants if of_request is None else _marked(wants, of_request)


def _marked(wants: Wants, marks: Marks) -> Wants:
    margins = None
    if marks.margins:
        margins = np.zeros(wants.num_steps, np.float32)
        known = marks.margins[: wants.num_steps]
        margins[: len(known)] = known
    pages = marks.milestone_pages(wants.page_size, wants.first_page, wants.wanted.shape[2])
    return replace(wants, milestones=pages, margins=margins)


def _dense(
    rid: str, prompt_pages: int, steps: list[PageStep], recording: PageRecording, share: float
) -> Wants:
    num_pages = np.array([-(-step.seq_len // recording.page_size) for step in steps])
    heads = steps[0].wanted.shape[0] * steps[0].wanted.shape[1]
    shape = (len(steps), heads, int(num_pages.max()))
    wanted, mass = np.zeros(shape, np.bool_), np.zeros(shape, np.float32)
    for at, step in enumerate(steps):
        pages = step.wanted.reshape(heads, -1)
        rows = np.arange(heads)[:, None]
        mass[at, rows, pages] = step.mass.reshape(heads, -1)
        wanted[at, rows, pages[:, : math.ceil(share * num_pages[at])]] = True
    layer_heads = int(steps[0].wanted.shape[1])
    wants = Wants(rid, recording.page_size, 0, prompt_pages, num_pages, wanted, mass, layer_heads)
    wants.check_integrity()
    return wants
