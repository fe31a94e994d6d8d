"""Recorded page lists with pages brought to the device when a request is admitted: what is loaded when.

The server's own slots and policies, a layer at a time, one request at a time. A generated token reads the
pages of largest attention, by the best KV head of a layer, as selectors choose. When a question about a
cached document is admitted, the best pages of the document, by some ranking, are brought before its first
step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sgl_importance.options import ImportanceOptions
from sgl_importance.pages.device_plan import TILE_TOKENS
from sgl_importance.trace.page_steps import (
    Floats,
    ListedRequest,
    Numbers,
    PageRecording,
    PageStep,
    RequestEnd,
)
from sgl_importance_kernels.pages.page_history import PageHistory, Residency
from sgl_importance_kernels.pages.residency_replay import ResidencyReplay

SELECTED = 0.1
"""Share of the pages of its context that a generated token reads."""

MOST = 0.2
"""Share of a document that is ranked: twice what a token reads."""

QUESTION_TOKENS = 64
"""A pass with fewer new tokens of a prompt is a question about a cached document."""

RANKINGS = ("none", "uniform", "shuffled", "importance", "importance by layer", "lfu", "perfect")
"""What is brought, best first. ``importance`` is what the radix tree knows of a page: the attention of
earlier queries, mean over layers and heads, with the tree's half-life; ``shuffled`` gives its numbers to
other pages of the document. ``lfu`` counts in each layer how often steps chose a page; ``perfect`` are the
pages that the first step will read."""


@dataclass(frozen=True, slots=True)
class Reads:
    """What one token reads of a layer: pages, and the attention that they are chosen for, float32."""

    pages: Numbers
    shares: Floats


@dataclass(slots=True)
class Question:
    """A question about a document in the cache.

    Attributes:
        rid: of the request, "kind/document/turn".
        prefix: complete pages of the document.
        importance: of these pages, by the radix tree; float64 [pages].
        picks: of each ranking and layer, pages best first.
        answer: first generated token's reads, by layer.
    """

    rid: str
    prefix: Numbers
    importance: Floats
    picks: dict[str, list[Numbers]]
    answer: list[Reads] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Step:
    """One token of a recording.

    Attributes:
        before: pages before the tokens of its pass; what a prompt that reads everything streams.
        reads: by layer.
        open_page: that its request fills.
        is_prompt: whether it is the last of a prompt, or of its part.
        question: it belongs to; None for the computing of a document.
    """

    before: Numbers
    reads: list[Reads]
    open_page: int
    is_prompt: bool
    question: Question | None


@dataclass(slots=True)
class Loads:
    """Of the questions about one document, in pages and layers: what was brought at admission, what the first
    step that chose its pages had to load and what it read, and the loads of later ones, and of prompts that
    read everything."""

    questions: int = 0
    brought: int = 0
    first: int = 0
    first_read: int = 0
    later: int = 0
    streamed: int = 0


@dataclass(frozen=True, slots=True)
class Events:
    """A recording as it is replayed: steps in their order, and pages that are freed between them.

    Attributes:
        longest: context, in pages.
    """

    events: Sequence[Step | Numbers]
    num_layers: int
    num_pages: int
    page_size: int
    longest: int


class _Knowledge:
    """What earlier queries tell of pages."""

    def __init__(self, num_layers: int, num_pages: int) -> None:
        self.by_layer = np.zeros((num_layers, num_pages))
        self.choices = np.zeros((num_layers, num_pages))
        self._decay = 0.5 ** (1 / ImportanceOptions().half_life_queries)

    def fold(self, pages: Numbers, mass: Floats) -> None:
        """One query's attention, float [layers, pages]; as the tree folds it, a visit ages what was known."""
        self.by_layer[:, pages] = self.by_layer[:, pages] * self._decay + mass

    @property
    def of_tree(self) -> Floats:
        return self.by_layer.mean(axis=0)


def prepare(recording: PageRecording, seed: int = 0) -> Events:
    """Steps with their reads, and questions with the rankings of their documents at that time."""
    num_layers = recording.steps[0].wanted.shape[0]
    knowledge, draws = _Knowledge(num_layers, recording.num_pages), np.random.default_rng(seed)
    questions: dict[int, Question] = {}
    masses: dict[int, list[Floats]] = defaultdict(list)
    events: list[Step | Numbers] = []
    for event in recording.events:
        request = recording.requests[event.request]
        if isinstance(event, RequestEnd):
            events.append(request.pages[request.whole_pages :])
            seen = masses.pop(event.request, [])
            if seen:
                knowledge.fold(request.pages, np.mean(seen, axis=0))
            continue
        if event.is_behind or request.kind == "recorded":  # the server's own first request
            continue
        reads, mass = _reads(event, request, recording.page_size)
        before = request.pages[: (event.seq_len - event.new_tokens) // recording.page_size]
        if not event.is_generated and event.new_tokens <= QUESTION_TOKENS:
            known = knowledge.of_tree[before]
            picks = _rank(before, known, knowledge, draws)
            questions[event.request] = Question(request.rid, before, known, picks)
        question = questions.get(event.request)
        if question is not None and event.is_generated and not question.answer:
            question.answer = reads
        open_page = int(request.pages[-(-event.seq_len // recording.page_size) - 1])
        events.append(Step(before, reads, open_page, not event.is_generated, question))
        for layer, each in enumerate(reads):
            knowledge.choices[layer, each.pages] += 1
        masses[event.request].append(mass)
    longest = max(-(-step.seq_len // recording.page_size) for step in recording.steps)
    return Events(events, num_layers, recording.num_pages, recording.page_size, longest)


def _reads(step: PageStep, request: ListedRequest, page_size: int) -> tuple[list[Reads], Floats]:
    """What a step reads of each layer, and its attention on pages of its sequence, [layers, pages]."""
    num_pages = -(-step.seq_len // page_size)
    by_head = np.zeros((*step.wanted.shape[:2], len(request.pages)), np.float32)
    np.put_along_axis(by_head, step.wanted, step.mass, axis=2)
    count = max(1, int(SELECTED * num_pages))
    largest = by_head.max(axis=1)
    best = np.argsort(-largest, axis=1, kind="stable")[:, :count]
    reads = [Reads(request.pages[each], largest[layer, each]) for layer, each in enumerate(best)]
    return reads, by_head.mean(axis=1)


def _rank(
    prefix: Numbers, known: Floats, knowledge: _Knowledge, draws: np.random.Generator
) -> dict[str, list[Numbers]]:
    layers, most = len(knowledge.by_layer), int(MOST * len(prefix))

    def best(scores: Floats) -> Numbers:
        return prefix[np.argsort(-scores, kind="stable")[:most]]

    return {
        "importance": [best(known)] * layers,
        "shuffled": [best(draws.permutation(known))] * layers,
        "importance by layer": [best(scores[prefix]) for scores in knowledge.by_layer],
        "lfu": [best(scores[prefix]) for scores in knowledge.choices],
    }


class _WithPrior(PageHistory):
    """Values a page by what steps chose it for, and by a prior that does not fade while nobody asks."""

    def __init__(self, policy: Residency, num_layers: int, num_pages: int) -> None:
        super().__init__(policy, num_layers, num_pages + 1, "cpu")
        self.prior = torch.zeros(num_pages + 1)  # page 0 is padding's

    def worth(self, layer: int, pages: torch.Tensor, now: int) -> torch.Tensor:
        return super().worth(layer, pages, now) + self.prior[pages]


class PrefetchReplay(ResidencyReplay):
    """Slots to which pages are brought before they are read. Arguments as of ``run``."""

    def __init__(self, events: Events, policy: Residency, num_slots: int, *, has_prior: bool) -> None:
        shape = {"num_layers": events.num_layers, "num_pages": events.num_pages}
        staging_pages = -(-TILE_TOKENS // events.page_size)
        super().__init__(policy, **shape, num_slots=num_slots, staging_pages=staging_pages)
        self._history = _WithPrior(policy, **shape)
        if has_prior:
            self._table.history = self._history

    def know(self, pages: Numbers, importance: Floats) -> None:
        """Takes the tree's importance of pages as their prior."""
        self._history.prior[torch.from_numpy(pages) + 1] = torch.from_numpy(importance).float()

    def prefetch(self, layer: int, pages: Numbers) -> int:
        """Brings pages, as many as find a slot; those that had to be loaded."""
        wanted, table = torch.from_numpy(pages) + 1, self._table
        table.history.read(layer, wanted, table.now, None)
        brought, _ = table.give(layer, wanted[~table.is_resident(layer, wanted)], is_chosen=True)
        return int((brought >= 0).sum())


def run(
    events: Events,
    policy: Residency,
    num_slots: int,
    ranking: str = "none",
    budget: float = 0.0,
    *,
    prompt_selects: bool,
    has_prior: bool = False,
) -> dict[str, Loads]:
    """Loads of the questions about each document, by "kind/document".

    Args:
        events: of a recording.
        policy: of the server.
        num_slots: pages that each layer keeps.
        ranking: one of ``RANKINGS``.
        budget: share of the document that is brought, at most ``MOST``.
        prompt_selects: whether the question's last token chooses its pages; else the question reads all.
        has_prior: whether pages in slots are valued by the tree's importance, too.
    """
    replay = PrefetchReplay(events, policy, num_slots, has_prior=has_prior)
    found: dict[str, Loads] = defaultdict(Loads)
    has_chosen: set[str] = set()
    for event in events.events:
        if not isinstance(event, Step):
            replay.forget(event)
            continue
        question = event.question
        loads = Loads() if question is None else found[question.rid.rpartition("/")[0]]
        if event.is_prompt and question is not None:
            loads.questions += 1
            replay.know(question.prefix, question.importance)
            replay.begin_pass()  # of its own, with all rankings: what passes read last is safe from a stream
            for layer, pages in enumerate(_brought(event, question, ranking, budget, prompt_selects)):
                loads.brought += replay.prefetch(layer, pages)
        replay.begin_pass()
        if event.is_prompt and (question is None or not prompt_selects):
            loads.streamed += sum(replay.stream(layer, event.before) for layer in range(events.num_layers))
            continue
        loaded = sum(
            replay.read(layer, reads.pages, reads.shares, open_page=event.open_page)
            for layer, reads in enumerate(event.reads)
        )
        if question is not None and question.rid not in has_chosen:
            has_chosen.add(question.rid)
            loads.first += loaded
            loads.first_read += sum(len(reads.pages) for reads in event.reads)
        else:
            loads.later += loaded
    replay.check_integrity()
    return found


def _brought(
    step: Step, question: Question, ranking: str, budget: float, prompt_selects: bool
) -> Iterator[Numbers]:
    """Pages that are brought, of each layer."""
    count = int(budget * len(question.prefix))
    for layer in range(len(step.reads)):
        if ranking == "none":
            yield question.prefix[:0]
        elif ranking == "uniform":
            yield question.prefix[np.linspace(0, len(question.prefix) - 1, count).round().astype(np.int64)]
        elif ranking == "perfect":
            first = step.reads if prompt_selects else question.answer
            pages = first[layer].pages
            yield pages[np.isin(pages, question.prefix)][:count]
        else:
            yield question.picks[ranking][layer][:count]
