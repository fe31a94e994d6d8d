"""Rules of ``study thinking`` at work while an answer is written: what they let go is gone, or quantised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from benchmark.eviction.decoder import RowKeys
from sgl_importance_lab.study.thinking.keep_rules import KeepRule, Scores
from sgl_importance_lab.study.thinking.rule_run import evict, ranks_of
from sgl_importance_lab.study.thinking.wants import Bools, Wants

WANTED_SHARE = 0.1


class Ranking(Protocol):
    """Scores of a request's pages after a step; those of highest score stay."""

    def scores(self, step: int, row: RowKeys, live: Wants) -> Scores:
        """float64 [heads, columns]; ``live`` holds what was seen up to this step."""


@dataclass
class ByRule:
    """A rule of the study, fed step by step."""

    rule: KeepRule
    _running: Iterator[Scores] | None = None

    def scores(self, step: int, row: RowKeys, live: Wants) -> Scores:
        if self._running is None:
            self._running = self.rule(live)
        return next(self._running)


@dataclass
class ByPlan:
    """Scores that were computed beforehand from the same answer without eviction: the oracle's."""

    planned: Iterator[Scores]
    _last: Scores | None = None

    def scores(self, step: int, row: RowKeys, live: Wants) -> Scores:
        self._last = next(self.planned, self._last)
        assert self._last is not None
        found = np.full(live.wanted.shape[1:], -np.inf)
        columns = min(found.shape[1], self._last.shape[1])
        found[:, :columns] = self._last[:, :columns]
        return found


def live_wants(rid: str, prompt_tokens: int, steps: int, page_size: int, heads: int) -> Wants:
    """Of an answer that is yet to be written: everything 0 but the numbers of its pages.

    ``steps``: that it can have; step 0 has read the prompt.
    """
    num_pages = -(-(prompt_tokens + np.arange(steps)) // page_size)
    shape = (steps, heads, int(num_pages[-1]))
    return Wants(
        rid, page_size, 0, -(-prompt_tokens // page_size), num_pages,
        np.zeros(shape, np.bool_), np.zeros(shape, np.float32),
    )  # fmt: skip


def most_to_come(wants: Wants) -> Iterator[Scores]:
    """The largest attention that a later step gives each page: what an eviction for good should spare."""
    later = np.zeros((wants.num_steps + 1, *wants.mass.shape[1:]), np.float32)
    for step in range(wants.num_steps - 1, -1, -1):
        later[step] = np.maximum(later[step + 1], wants.mass[step])
    for step in range(wants.num_steps):
        yield later[step + 1].astype(np.float64)


def note_step(live: Wants, step: int, mass: Tensor) -> None:
    """Writes down what the heads attended to in a step, and so what they wanted.

    ``mass``: [layers, KV heads, tokens].
    """
    tokens = mass.reshape(-1, mass.shape[-1]).numpy()
    pages = np.add.reduceat(tokens, np.arange(0, tokens.shape[1], live.page_size), axis=1)
    num_pages = pages.shape[1]
    assert num_pages == live.num_pages[step]
    live.mass[step, :, :num_pages] = pages
    count = int(np.ceil(WANTED_SHARE * num_pages))
    best = np.argpartition(-pages, count - 1, axis=1)[:, :count]
    np.put_along_axis(live.wanted[step], best, True, axis=1)
    live.wanted[step] &= live.mass[step] > 0


@dataclass
class Evicting:
    """Lets go of pages that a ranking places behind the budget, for good.

    Attributes:
        ranking: of pages.
        live: what was seen.
        budget: pages of each head that stay, the one being filled included.
        resident: those that are there; bool [heads, columns].
        evicted: pages let go so far, over all heads.
    """

    ranking: Ranking
    live: Wants
    budget: int
    resident: Bools = field(init=False)
    evicted: int = 0

    def __post_init__(self) -> None:
        self.resident = np.zeros(self.live.wanted.shape[1:], np.bool_)

    def __call__(self, step: int, row: RowKeys) -> None:
        note_step(self.live, step, row.mass)
        before = int(self.live.num_pages[step - 1]) if step else 0
        num_pages = int(self.live.num_pages[step])
        self.resident[:, before:num_pages] = True
        scores = self.ranking.scores(step, row, self.live)
        if self.resident.sum(1).max() <= self.budget:
            return
        there = self.resident.copy()
        ranks = ranks_of(scores[None].copy(), self.live.num_pages[step, None])[0]
        left = self.resident[None]
        evict(left, ranks, np.array([self.budget]))
        gone = there & ~self.resident
        self.evicted += int(gone.sum())
        self.let_go(gone, row)

    def let_go(self, gone: Bools, row: RowKeys) -> None:
        """``gone``: bool [heads, columns], each page once."""
        row.seen[tokens_of(gone, self.live.page_size, row)] = False


@dataclass
class Demoting(Evicting):
    """Lets go of nothing, but writes what falls behind the budget in so many bits, for good.

    Attributes:
        bits: of each number; symmetric, one scale for each key and value of a token.
        spared: tokens that keep their precision; bool [tokens].
    """

    bits: int = 8
    spared: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    demoted: int = 0
    """Tokens of heads."""

    def let_go(self, gone: Bools, row: RowKeys) -> None:
        tokens = tokens_of(gone, self.live.page_size, row)
        tokens &= ~torch.from_numpy(self.spared[: tokens.shape[-1]])
        self.demoted += int(tokens.sum())
        for numbers in (row.keys, row.values):
            numbers[tokens] = quantised(numbers[tokens], self.bits)


def tokens_of(pages: Bools, page_size: int, row: RowKeys) -> Tensor:
    """Their tokens: bool [layers, KV heads, tokens]."""
    tokens = np.repeat(pages, page_size, axis=1)[:, : row.mass.shape[-1]]
    return torch.from_numpy(tokens).reshape(row.mass.shape)


def quantised(numbers: Tensor, bits: int) -> Tensor:
    """What is read back of rows written in so many bits, with a float16 scale for each; [rows, numbers]."""
    most = 2 ** (bits - 1) - 1
    scales = (numbers.abs().amax(-1, keepdim=True) / most).half().float().clamp(min=1e-8)
    return (numbers / scales).round().clamp(-most, most) * scales


@dataclass
class RKV:
    """R-KV (arXiv 2505.24133): attention of the last 8 queries, less what other keys say as well.

    0.07 x (7-wide maximum of their mean attention, the largest of the heads that share a KV head) - 0.93 x
    softmax(mean cosine similarity of keys, the last similar key exempt). Ranked every 128 steps; newer
    tokens are kept until then. A page has the mean of its tokens.
    """

    every: int = 128
    last_queries: int = 8
    width: int = 7
    similar: float = 0.5
    part: float = 0.07
    _recent: list[Tensor] = field(default_factory=list)
    _ranked: Scores | None = None

    def scores(self, step: int, row: RowKeys, live: Wants) -> Scores:
        self._recent = [
            *self._recent[1 - self.last_queries :],
            row.most.reshape(-1, row.most.shape[-1]).clone(),
        ]
        if self._ranked is None or step % self.every == 0:
            ranked = np.full(live.wanted.shape[1:], np.inf)
            num_pages = int(live.num_pages[step])
            ranked[:, :num_pages] = self._pages(row, live.page_size)
            newest = (row.mass.shape[-1] - self.last_queries) // live.page_size
            ranked[:, newest:num_pages] = 1e6 + np.arange(num_pages - newest)
            self._ranked = ranked
        return np.where(np.isinf(self._ranked), 1e9, self._ranked)

    def _pages(self, row: RowKeys, page_size: int) -> Scores:
        tokens = row.mass.shape[-1]
        attention = torch.zeros(len(self._recent), *self._recent[0].shape[:1], tokens)
        for query, mass in enumerate(self._recent):
            attention[query, :, : mass.shape[-1]] = mass
        mean = attention.mean(0)
        pooled = torch.nn.functional.max_pool1d(mean, self.width, stride=1, padding=self.width // 2)
        keys = row.keys.reshape(-1, tokens, row.keys.shape[-1])
        seen = row.seen.reshape(-1, tokens)
        score = self.part * pooled - (1 - self.part) * redundancy(keys, seen, self.similar)
        starts = np.arange(0, tokens, page_size)
        sums = np.add.reduceat(score.double().numpy(), starts, axis=1)
        return sums / np.diff([*starts, tokens])


def redundancy(keys: Tensor, seen: Tensor, similar: float) -> Tensor:
    """Softmax over keys of how like a key is to the others on average; [heads, tokens].

    For each key the last one that is like it is exempt: of several alike the newest stays.

    Args:
        keys: [heads, tokens, dimension].
        seen: those that are left, [heads, tokens]; of the others nothing is said.
        similar: cosine above which two keys are alike.
    """
    unit = torch.nn.functional.normalize(keys, dim=-1)
    both = seen[:, :, None] & seen[:, None, :]
    cosine = (unit @ unit.transpose(1, 2)).masked_fill(~both, 0)
    cosine.diagonal(dim1=1, dim2=2).zero_()
    order = torch.arange(keys.shape[1])
    last = torch.where(cosine > similar, order, -1).amax(2)
    exempt = last >= 0
    cosine.scatter_(2, last.clamp(min=0)[..., None], torch.where(exempt[..., None], 0.0, cosine[:, :, :1]))
    mean = cosine.sum(1) / seen.sum(1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~seen, -torch.inf).softmax(-1)
