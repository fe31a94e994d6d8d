"""Two caches on the same requests: tokens saved and lost, with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import NormalDist

MAX_BATCHES = 64
MIN_BATCHES = 8
MIN_REQUESTS = 512
"""Below, batches are shorter than the runs of luck of a cache, and an interval says less than it seems to."""
CONFIDENCE = 0.95
TUNED_FOR_REQUESTS = 1000
"""Where the interval is tightest beside one that holds at a single look: half as wide again."""


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t, by the series in 1/degrees (Abramowitz, Stegun 1964, 26.7.5); off by less
    than 1 % from 7 degrees of freedom on at 0.975."""
    assert degrees > 0
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(sum(term / degrees**power for power, term in enumerate(terms)))


def uniform_quantile(requests: int) -> float:
    """Standard errors on either side of a mean, so that it is within at every look at once.

    The boundary of an asymptotic confidence sequence (Waudby-Smith et al., Time-uniform central limit theory
    and asymptotic confidence sequences, 2024), with the parameter that is best at TUNED_FOR_REQUESTS.
    """
    alpha = 1 - CONFIDENCE
    information = (-2 * math.log(alpha) + math.log(-2 * math.log(alpha) + 1)) / TUNED_FOR_REQUESTS
    scaled = requests * information
    return math.sqrt(2 * (scaled + 1) / scaled * math.log(math.sqrt(scaled + 1) / alpha))


@dataclass(slots=True)
class Comparison:
    """Hit tokens of another cache beside those of LRU, request by request; bounded memory.

    Requests depend on those before them, so an interval comes from means of batches of consecutive requests
    (Schmeiser, Batch size effects in the analysis of simulation output, 1982): batches double in size
    whenever there would be more than MAX_BATCHES of them.

    Attributes:
        requests: compared so far.
        prompt_tokens: of these.
        lru_hit_tokens: found by LRU.
        other_hit_tokens: found by the other.
        saved_tokens: found by the other only.
        lost_tokens: found by LRU only.
        batches: (prompt tokens, the other's hits less LRU's) of each full batch, in order.
    """

    requests: int = 0
    prompt_tokens: int = 0
    lru_hit_tokens: int = 0
    other_hit_tokens: int = 0
    saved_tokens: int = 0
    lost_tokens: int = 0
    batches: list[tuple[int, int]] = field(default_factory=list)
    _batch_requests: int = 1
    _open: tuple[int, int, int] = (0, 0, 0)

    def add(self, prompt_tokens: int, lru_hits: int, other_hits: int) -> None:
        """Adds one request, with the tokens that each cache found of its prompt."""
        difference = other_hits - lru_hits
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.lru_hit_tokens += lru_hits
        self.other_hit_tokens += other_hits
        self.saved_tokens += max(difference, 0)
        self.lost_tokens += max(-difference, 0)
        count, tokens, gained = self._open
        count, tokens, gained = count + 1, tokens + prompt_tokens, gained + difference
        if count < self._batch_requests:
            self._open = (count, tokens, gained)
            return
        self._open = (0, 0, 0)
        self.batches.append((tokens, gained))
        if len(self.batches) == MAX_BATCHES:
            pairs = zip(self.batches[::2], self.batches[1::2], strict=True)
            self.batches = [(a + c, b + d) for (a, b), (c, d) in pairs]
            self._batch_requests *= 2

    @property
    def agreed_tokens(self) -> int:
        """Tokens found by both."""
        return self.lru_hit_tokens - self.lost_tokens


def gain_interval(batches: list[tuple[int, int]], requests: int) -> tuple[float, float] | None:
    """Interval of the share of prompt tokens that the other cache saves, negative where it costs.

    It may be looked at again and again until it says something: all intervals hold at once.

    Args:
        batches: (prompt tokens, tokens gained) of consecutive stretches of traffic.
        requests: in all of them.

    Returns:
        Bounds at CONFIDENCE for the ratio of sums; None with fewer than MIN_BATCHES or MIN_REQUESTS.
    """
    if len(batches) < MIN_BATCHES or requests < MIN_REQUESTS:
        return None
    tokens = sum(batch[0] for batch in batches)
    if not tokens:
        return None
    ratio = sum(batch[1] for batch in batches) / tokens
    squares = sum((gained - ratio * prompt) ** 2 for prompt, gained in batches)
    count = len(batches)
    error = math.sqrt(count / (count - 1) * squares) / tokens
    at_risk = (1 + CONFIDENCE) / 2
    few_batches = student_quantile(at_risk, count - 1) / NormalDist().inv_cdf(at_risk)
    width = uniform_quantile(requests) * few_batches * error
    return ratio - width, ratio + width


def knee(capacities: Sequence[float], rates: Sequence[float]) -> int:
    """Where the curve of hits by capacity bends: behind this point more memory brings less than on average.

    The point farthest above the line from nothing to the largest capacity (Satopaa et al., Finding a
    "Kneedle" in a Haystack, 2011).

    Args:
        capacities: rising.
        rates: hits or hit rates at these.

    Returns:
        Number of the point; 0 where nothing hits.
    """
    if not rates[-1]:
        return 0
    above = [
        rate / rates[-1] - capacity / capacities[-1] for rate, capacity in zip(rates, capacities, strict=True)
    ]
    return max(range(len(above)), key=above.__getitem__)


class Verdict(StrEnum):
    """Verdict that follows from the interval."""

    TOO_EARLY = "too early to say"
    SAVES = "importance saves tokens here"
    COSTS = "importance costs tokens here"
    EVEN = "no difference shown"


def verdict(batches: list[tuple[int, int]], requests: int) -> Verdict:
    """Whether switching would pay, by ``gain_interval``; no eviction yet means no difference."""
    interval = gain_interval(batches, requests)
    if interval is None:
        return Verdict.TOO_EARLY
    low, high = interval
    if low > 0:
        return Verdict.SAVES
    return Verdict.COSTS if high < 0 else Verdict.EVEN
