"""Rules that say which pages to keep on the device while an answer is written; none sees the future.

A rule gives each page a score after every step; those of highest score are kept (``rule_run``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from sgl_importance_lab.study.thinking.measures import RANKED_EVERY
from sgl_importance_lab.study.thinking.wants import Wants

Scores = npt.NDArray[np.float64]
KeepRule = Callable[[Wants], Iterator[Scores]]
"""Scores [heads, columns] after each step, from what was seen up to it."""

NEWEST_TOKENS = 64
ACTIVE_MASS = 1e-4
"""Attention to a token from which on LazyEviction counts it as read, for models under 8 B parameters."""
EMA_DECAY = 0.9
FIRST = 1e18
"""Above every score that a rule computes."""


def recency(wants: Wants) -> Iterator[Scores]:
    """The newest pages (TTKV and every sliding window)."""
    positions = np.broadcast_to(np.arange(wants.wanted.shape[2], dtype=np.float64), wants.wanted.shape[1:])
    for _ in range(wants.num_steps):
        yield positions


def lru(wants: Wants) -> Iterator[Scores]:
    """What was wanted last."""
    last = np.full(wants.wanted.shape[1:], -1.0)
    for step, wanted in enumerate(wants.wanted):
        last[wanted] = step
        yield last


def lfu(wants: Wants) -> Iterator[Scores]:
    """What was wanted most often."""
    count = np.zeros(wants.wanted.shape[1:])
    for wanted in wants.wanted:
        count += wanted
        yield count


def ema(wants: Wants) -> Iterator[Scores]:
    """Exponential average of a page's attention."""
    average = np.zeros(wants.mass.shape[1:])
    for mass in wants.mass:
        average = EMA_DECAY * average + (1 - EMA_DECAY) * mass
        yield average


def attention_score(wants: Wants) -> Iterator[Scores]:
    """Attention so far by the number of queries that could see the page; the newest 64 tokens are exempt.

    DiffKV (arXiv 2412.03131) prunes and quantises by this.
    """
    total = np.zeros(wants.mass.shape[1:])
    queries = np.zeros(wants.mass.shape[2])
    newest = -(-NEWEST_TOKENS // wants.page_size)
    for step, mass in enumerate(wants.mass):
        num_pages = int(wants.num_pages[step])
        total += mass
        queries[:num_pages] += 1
        scores = total / np.maximum(queries, 1)
        scores[:, max(0, num_pages - newest) : num_pages] += FIRST
        yield scores


def stability(wants: Wants) -> Iterator[Scores]:
    """The pages of largest attention at the last ranking, every 16th step (FlexiCache's stable heads)."""
    scores = np.zeros(wants.mass.shape[1:])
    for step, mass in enumerate(wants.mass):
        if step % RANKED_EVERY == 0:
            scores = mass.astype(np.float64)
        yield scores


def lazy(wants: Wants) -> Iterator[Scores]:
    """LazyEviction (arXiv 2506.15969): by the largest gap between two reads, and the time since the last.

    2 sigmoid(-since / gap) + 2 sigmoid(-gap - 1), the second 0 for a page that was never read again; the
    newest 64 tokens are kept. Ranked after every step, where the paper waits for a window to fill.
    """
    active = ACTIVE_MASS * wants.page_size
    newest = -(-NEWEST_TOKENS // wants.page_size)
    last = np.zeros(wants.mass.shape[1:])
    gap = np.zeros_like(last)
    existed = 0
    for step, mass in enumerate(wants.mass):
        num_pages = int(wants.num_pages[step])
        last[:, existed:num_pages] = step
        existed = num_pages
        read = mass > active
        gap[read] = np.maximum(gap[read], (step - last)[read])
        last[read] = step
        recent = 2 / (1 + np.exp(np.minimum((step - last) / np.maximum(gap, 1e-9), 700)))
        again = np.where(gap > 0, 2 / (1 + np.exp(np.minimum(gap + 1, 700))), 0)
        scores = recent + again
        scores[:, max(0, num_pages - newest) : num_pages] += FIRST
        yield scores


def raas(wants: Wants) -> Iterator[Scores]:
    """RaaS (arXiv 2502.11147): the prompt is pinned; of the rest, what was read last above a threshold."""
    active = ACTIVE_MASS * wants.page_size
    last = np.zeros(wants.mass.shape[1:])
    existed = 0
    for step, mass in enumerate(wants.mass):
        num_pages = int(wants.num_pages[step])
        last[:, existed:num_pages] = step
        existed = num_pages
        last[mass > active] = step
        scores = last.copy()
        scores[:, : wants.prompt_pages] += FIRST
        yield scores


def random_behind_prompt(wants: Wants) -> Iterator[Scores]:
    """The control: the prompt, and of the rest any; where the prompt does not fit, any of it.

    It matches or beats evictors by attention on reasoning models (arXiv 2609.03430).
    """
    draws = np.random.default_rng(zlib.crc32(wants.rid.encode()))
    scores = draws.random(wants.mass.shape[1:])
    scores[:, : wants.prompt_pages] += FIRST
    for _ in range(wants.num_steps):
        yield scores


def oracle(wants: Wants) -> Iterator[Scores]:
    """What will be wanted soonest (Belady 1966). It sees the future, as a bound."""
    steps, shape = wants.num_steps, wants.wanted.shape[1:]
    soonest = np.full((steps + 1, *shape), steps, np.int32)  # behind a step, the next one that wants the page
    for step in range(steps - 1, -1, -1):
        soonest[step] = np.where(wants.wanted[step], step, soonest[step + 1])
    for step in range(steps):
        yield -soonest[step + 1].astype(np.float64)


KEEP_RULES: Mapping[str, KeepRule] = {
    "recency": recency,
    "stability": stability,
    "attention score": attention_score,
    "LazyEviction": lazy,
    "RaaS": raas,
    "LRU": lru,
    "LFU": lfu,
    "EMA": ema,
    "random, prompt kept": random_behind_prompt,
    "oracle": oracle,
}
