"""Policies for the pages of a context in fast memory, when each decode step asks for its top-k pages.

A step's pages are looked up first; missing ones are brought in, then the residents of lowest priority go.
Every policy may also pass a page through without keeping it, so that the furthest-next-use order (Belady
1966) is the optimum. Scores that rank at step t come from steps before t.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_importance_lab.study.recording import Scores
from sgl_importance_lab.study.streams import StepScores, Stream

Pages = npt.NDArray[np.int64]
SINK_PAGES = 1
HALF_LIFE_STEPS = 16.0
WINDOW_STEPS = 16


def requested(step: StepScores, share: float) -> Pages:
    """The ``share`` pages of highest mass that the step sees, at least one."""
    count = max(1, round(share * len(step.pages)))
    return step.pages[np.argsort(-step.mass, kind="stable")[:count]]


class Residency(ABC):
    """Ranks the pages of one stream; the resident pages of highest priority stay.

    Args:
        stream: whose pages are ranked; only its shape is looked at, except by the optimum.
        requests: pages asked for at each step.
    """

    def __init__(self, stream: Stream, requests: Sequence[Pages]) -> None:
        self.priority: Scores = np.zeros(stream.num_pages)

    @abstractmethod
    def update(self, index: int, step: StepScores, asked: Pages) -> None:
        """Step ``index`` has run: sets the priorities that hold until the next one has."""


class Lru(Residency):
    """Least recently requested goes first."""

    def update(self, index: int, step: StepScores, asked: Pages) -> None:
        self.priority[asked] = index + 1


class Lfu(Residency):
    """Least often requested goes first; equal counts by recency."""

    def update(self, index: int, step: StepScores, asked: Pages) -> None:
        self.priority[asked] = np.floor(self.priority[asked]) + 1 + (index + 1) / (index + 2)


class RecencySinks(Residency):
    """The first page and the youngest ones, as StreamingLLM keeps them (Xiao et al., ICLR 2024)."""

    def __init__(self, stream: Stream, requests: Sequence[Pages]) -> None:
        super().__init__(stream, requests)
        self._positions = stream.positions

    def update(self, index: int, step: StepScores, asked: Pages) -> None:
        self.priority[step.pages] = index + self._positions[step.pages] / len(self._positions)
        self.priority[step.pages[:SINK_PAGES]] = np.inf


class Ema(Residency):
    """Exponentially weighted mass of every page that a step sees, requested or not."""

    def update(self, index: int, step: StepScores, asked: Pages) -> None:
        self.priority *= 0.5 ** (1 / HALF_LIFE_STEPS)
        self.priority[step.pages] += step.mass


class Window(Residency):
    """Mass over the last steps, as SnapKV's observation window counts it (Li et al., NeurIPS 2024)."""

    def __init__(self, stream: Stream, requests: Sequence[Pages]) -> None:
        super().__init__(stream, requests)
        self._recent: list[StepScores] = []

    def update(self, index: int, step: StepScores, asked: Pages) -> None:
        self._recent.append(step)
        self.priority[step.pages] += step.mass
        if len(self._recent) > WINDOW_STEPS:
            old = self._recent.pop(0)
            self.priority[old.pages] -= old.mass


class Combined(Residency):
    """EMA of mass plus EMA of peak, the first page always kept."""

    def update(self, index: int, step: StepScores, asked: Pages) -> None:
        self.priority *= 0.5 ** (1 / HALF_LIFE_STEPS)
        self.priority[step.pages] += step.mass + step.peak
        self.priority[step.pages[:SINK_PAGES]] = np.inf


class Optimum(Residency):
    """Furthest next request goes first (Belady 1966): the ceiling, since it knows the future."""

    def __init__(self, stream: Stream, requests: Sequence[Pages]) -> None:
        super().__init__(stream, requests)
        self._next: list[npt.NDArray[np.float64]] = []
        coming = np.full(stream.num_pages, np.inf)
        for index in range(len(requests) - 1, -1, -1):
            self._next.append(coming[requests[index]].copy())
            coming[requests[index]] = index
        self._next.reverse()

    def update(self, index: int, step: StepScores, asked: Pages) -> None:
        self.priority[asked] = -self._next[index]


POLICIES: dict[str, type[Residency]] = {
    "lru": Lru,
    "lfu": Lfu,
    "recency+sinks": RecencySinks,
    "ema": Ema,
    "window": Window,
    "combined": Combined,
    "optimum": Optimum,
}


@dataclass(frozen=True, slots=True)
class Hits:
    """Pages that steps asked for, and how many of them were resident."""

    hits: int
    requests: int


def replay(stream: Stream, policy: str, *, share: float, budget_pages: int) -> Hits:
    """Runs one stream through one policy.

    Args:
        stream: steps over one context.
        policy: name in ``POLICIES``.
        share: of the visible pages that each step asks for.
        budget_pages: pages that fast memory holds.
    """
    assert budget_pages > 0
    requests = [requested(step, share) for step in stream.steps]
    ranking = POLICIES[policy](stream, requests)
    resident = np.zeros(stream.num_pages, dtype=bool)
    hits = total = 0
    for index, (step, asked) in enumerate(zip(stream.steps, requests, strict=True)):
        hits += int(resident[asked].sum())
        total += len(asked)
        ranking.update(index, step, asked)
        resident[asked] = True
        held = np.flatnonzero(resident)
        if len(held) > budget_pages:
            # Equal priorities: the page that came into the stream first goes.
            order = np.argsort(ranking.priority[held], kind="stable")
            resident[held[order[: len(held) - budget_pages]]] = False
    return Hits(hits, total)
