"""How far back a head reads: a profile of distances, and the pages that come into its reach by it.

Rotary embeddings make attention a function of distance, and with each token every page is one token farther
back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_importance_lab.study.thinking.keep_rules import Scores
from sgl_importance_lab.study.thinking.wants import Counts, Wants

BINS_PER_PAGE = 4
WEIGHT_OF_MEAN = 32.0
"""Reads that a head's mean rate counts for in each bin, so that a bin that was hardly seen says little."""

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class DistanceProfile:
    """Of each head, how often a page at a distance was wanted.

    Attributes:
        wanted: times, [heads, bins].
        seen: times that there was a page at the distance, [bins].
    """

    wanted: Floats
    seen: Floats

    @staticmethod
    def empty(num_heads: int, num_bins: int) -> DistanceProfile:
        return DistanceProfile(np.zeros((num_heads, num_bins)), np.zeros(num_bins))

    def add(self, wants: Wants, step: int, bins: Counts) -> None:
        """One step; ``bins`` of its pages."""
        # Pages are farther apart than bins are wide: none is twice among them.
        self.wanted[:, bins] += wants.wanted[step, :, : len(bins)]
        self.seen[bins] += 1

    def rates(self) -> Floats:
        """Share of the pages at each distance that a head wants, [heads, bins]."""
        mean = self.wanted.sum(1, keepdims=True) / max(self.seen.sum(), 1)
        rates: Floats = (self.wanted + WEIGHT_OF_MEAN * mean) / (self.seen + WEIGHT_OF_MEAN)
        return rates

    def __call__(self, wants: Wants) -> Iterator[Scores]:
        """As a prefetcher: what is wanted most often at the distance that a page has in the next step."""
        rates = self.rates()
        for step in range(wants.num_steps):
            yield _scores(rates, wants, bins_of(wants, step, ahead=1))


def fit_profile(requests: Sequence[Wants]) -> DistanceProfile:
    """From other answers than those that it will be used for."""
    profile = DistanceProfile.empty(requests[0].num_heads, max(map(num_bins, requests)))
    for wants in requests:
        for step in range(wants.num_steps):
            profile.add(wants, step, bins_of(wants, step))
    return profile


def own_profile(wants: Wants) -> Iterator[Scores]:
    """As a prefetcher: the profile of the answer itself, as far as it is written."""
    profile = DistanceProfile.empty(wants.num_heads, num_bins(wants))
    for step in range(wants.num_steps):
        profile.add(wants, step, bins_of(wants, step))
        yield _scores(profile.rates(), wants, bins_of(wants, step, ahead=1))


def bins_of(wants: Wants, step: int, *, ahead: int = 0) -> Counts:
    """Bins of the distances, in tokens, from a step's token, or one so many behind it, to its pages' first
    tokens; [pages of the step].
    """
    size, num_pages = wants.page_size, int(wants.num_pages[step])
    fills = np.flatnonzero(np.diff(wants.num_pages)) + 1
    # Steps follow each other: the first token of a page tells where in their pages all others are.
    offset = (step - int(fills[0])) % size if len(fills) else step % size
    distances = size * np.arange(num_pages - 1, -1, -1) + offset + ahead
    return distances // bin_tokens(size)


def bin_tokens(page_size: int) -> int:
    return max(1, page_size // BINS_PER_PAGE)


def num_bins(wants: Wants) -> int:
    """Bins of the longest distance, and one for the step behind the last."""
    return int(wants.num_pages[-1] * wants.page_size) // bin_tokens(wants.page_size) + 2


def _scores(rates: Floats, wants: Wants, bins: Counts) -> Scores:
    scores = np.full(wants.wanted.shape[1:], -np.inf)
    known = np.minimum(bins, rates.shape[1] - 1)  # farther back than any answer that it was learnt from
    scores[:, : len(bins)] = rates[:, known]
    return scores
