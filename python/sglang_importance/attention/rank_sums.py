"""Page scores of all tensor-parallel ranks, the same to the last bit on each of them.

A rank sees its own heads only, and eviction must be decided alike on all. Floats added in another order on
another rank would differ, so integers are added: a page's mean over query tokens is a number in [0, 1].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from sglang_importance.attention.rows import RowScores, ScoreRows, ScoresFailed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SCALE = 1 << 24
"""Steps of 6e-8: a four-thousandth of the body mass of a page among 8192 equal ones."""
MAX_RANKS = (2**31 - 1) // SCALE
"""Ranks whose sum fits int32 whatever their scores are: 127."""


def to_fixed(means: npt.NDArray[np.floating]) -> npt.NDArray[np.int32]:
    """Finite numbers in [0, 1], in steps of 1 / ``SCALE``; rounding errors outside are cut off."""
    scaled = np.rint(np.clip(np.asarray(means, dtype=np.float64), 0.0, 1.0) * SCALE)
    return scaled.astype(np.int32)


def from_fixed(total: npt.NDArray[np.integer], ranks: int) -> npt.NDArray[np.float64]:
    """The mean over ``ranks`` of numbers whose sum is ``total``."""
    return np.asarray(total, dtype=np.float64) / (SCALE * ranks)


def share(rows: ScoreRows | None, group: ProcessGroup | None) -> None:
    """Lets ``rows`` be consumed as the scores of all ranks of ``group``, where it has several."""
    if rows is not None and group is not None and dist.get_world_size(group) > 1:
        rows.over_ranks = RankSums(group).reduced


class RankSums:
    """Reduces a request's row over the ranks of a group, once per fold.

    Peak is the maximum. Body mass is the mean of the ranks' body masses: each rank has divided by the body of
    its own heads, where a single rank divides by that of all, so a rank whose heads look at sinks only weighs
    as much as the others.

    Args:
        group: of CPU tensors (gloo), as upstream's caches use it; every rank must call in the same order.

    Raises:
        ValueError: more ranks than int32 sums allow.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.ranks = dist.get_world_size(group)
        if self.ranks > MAX_RANKS:
            raise ValueError(f"page scores of {self.ranks} tensor-parallel ranks: at most {MAX_RANKS}")

    def reduced(self, row: RowScores | None, failed: bool) -> RowScores | None:
        """The row over all ranks' heads; None where nothing was accumulated, or a rank's sums are not finite.

        Args:
            row: of this rank.
            failed: whether this rank could not take its scores.

        Raises:
            ScoresFailed: a rank could not take its scores, or the ranks do not hold the same query tokens and
                pages; on every rank alike.
        """
        are_finite = self._check_alike(row, failed)
        if row is None or not are_finite:
            return None
        # From here on nothing may raise: the other ranks enter both reductions.
        tokens = row.query_tokens
        bodies = torch.from_numpy(to_fixed(row.body / tokens))
        peaks = torch.from_numpy(to_fixed(row.peak))
        dist.all_reduce(bodies, dist.ReduceOp.SUM, self._group)
        dist.all_reduce(peaks, dist.ReduceOp.MAX, self._group)
        return RowScores(
            body=(from_fixed(bodies.numpy(), self.ranks) * tokens).astype(np.float32),
            peak=from_fixed(peaks.numpy(), 1).astype(np.float32),
            query_tokens=tokens,
        )

    def _check_alike(self, row: RowScores | None, failed: bool) -> bool:
        """Whether the sums of every rank are finite; a NaN is one request's matter, not the server's."""
        pages, tokens = (0, 0) if row is None else (len(row.body), row.query_tokens)
        is_finite = row is None or bool(np.isfinite(row.body).all() and np.isfinite(row.peak).all())
        extremes = torch.tensor([pages, -pages, tokens, -tokens, failed, not is_finite], dtype=torch.int64)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, self._group)
        most_pages, least_pages, most_tokens, least_tokens, any_failed, any_infinite = extremes.tolist()
        if any_failed:
            raise ScoresFailed("a tensor-parallel rank could not take its page scores")
        if (most_pages, most_tokens) != (-least_pages, -least_tokens):
            raise ScoresFailed(
                f"tensor-parallel ranks hold between {-least_pages} and {most_pages} pages of "
                f"{-least_tokens} to {most_tokens} query tokens of one request"
            )
        return not any_infinite
