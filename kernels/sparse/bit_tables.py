"""How many bits each channel of a key gets, from what a model's keys and queries are like."""

from __future__ import annotations

from dataclasses import dataclass

import torch

WIDTHS = (0, 1, 2, 4)
"""Bits that a channel may have: codes of these never straddle a byte."""

STEPS = (0.0, 1.596, 0.9957, 0.3352)
"""Of each width, the step of the best uniform quantiser of a normal variable of deviation 1 (Max, 1960)."""
DISTORTIONS = (1.0, 0.3634, 0.1188, 0.01154)
"""What it leaves of the variance."""

CALIBRATION_TOKENS = 1024


def calibration_tokens(vocabulary: int) -> torch.Tensor:
    """Token ids that a model's statistics are taken from, int64 [CALIBRATION_TOKENS], drawn at random.

    So they hang on the model alone, neither on a text nor on what is served. Bits that several kinds of text
    gave chose no better.
    """
    return torch.randint(vocabulary, (CALIBRATION_TOKENS,), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True, slots=True)
class KeyStatistics:
    """What decides on bits: of each layer, KV head and channel, float32 [layers, KV heads, head dimension].

    Attributes:
        variances: of keys around the mean of their page.
        energies: mean squares of the queries of the KV head's group.
    """

    variances: torch.Tensor
    energies: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor, queries: torch.Tensor, page_size: int) -> KeyStatistics:
        """Statistics of one text.

        Args:
            keys: of at least a page of tokens, rotated, [layers, tokens, KV heads, head dimension].
            queries: of the same tokens, [layers, tokens, heads, head dimension].
            page_size: tokens per page.
        """
        pages = keys.shape[1] // page_size
        by_page = keys[:, : pages * page_size].float().unflatten(1, (pages, page_size))
        variances = by_page.var(dim=2, correction=0).mean(dim=1)
        groups = queries.float().unflatten(2, (keys.shape[2], -1))
        return cls(variances, groups.square().mean(dim=(1, 3)))


@dataclass(frozen=True, slots=True)
class BitTables:
    """How codes lie: [layers, KV heads, head dimension], or those of one layer.

    A page keeps the codes of a channel together, eight tokens in as many bytes as the channel has bits.
    Channels of four bits come first, then those of two and of one, each in their order.

    Attributes:
        widths: bits of each channel, int32.
        starts: before how many of a page's codes, in bits of one token, a channel's begin; int32.
        steps: of its codes, float32; 0 where it has none.
    """

    widths: torch.Tensor
    starts: torch.Tensor
    steps: torch.Tensor

    @staticmethod
    def num_bytes(layers: int, kv_heads: int, head_dim: int) -> int:
        """What all tables take."""
        return layers * kv_heads * head_dim * 3 * 4

    @classmethod
    def allotted(cls, statistics: KeyStatistics, bits: int) -> BitTables:
        """Shares out the bits of a token, for each layer and KV head.

        The next go where they take most from the error of products, by bit: variance within a page times the
        energy of queries times what a width leaves of it. Two channels that a rotation turns into each other
        count as their mean.

        Args:
            statistics: of the model.
            bits: of all channels of a token together.
        """
        variances, energies = map(_paired, (statistics.variances, statistics.energies))
        layers, heads, dim = variances.shape
        weights = (variances * energies).reshape(-1, dim)
        level = torch.zeros_like(weights, dtype=torch.int64)  # index into WIDTHS
        left = torch.full((len(weights), 1), bits, device=weights.device)
        widths, kept = (torch.tensor(each, device=weights.device) for each in (WIDTHS, DISTORTIONS))
        costs = torch.cat([widths.diff(), widths.new_full((1,), bits + 1)])
        gains = torch.cat([-kept.diff(), kept.new_zeros(1)]) / costs
        for _ in range(bits):  # at least one bit each time
            worth = (weights * gains[level]).masked_fill(costs[level] > left, -1.0)
            best = worth.argmax(dim=1, keepdim=True)
            is_given = worth.gather(1, best) >= 0
            left -= costs[level.gather(1, best)] * is_given
            level.scatter_add_(1, best, is_given.long())
        given = widths[level]
        order = given.argsort(dim=1, descending=True, stable=True)
        behind = given.gather(1, order).cumsum(dim=1)
        starts = torch.empty_like(given).scatter_(1, order, behind - given.gather(1, order))
        steps = torch.tensor(STEPS, device=weights.device)[level] * variances.reshape(-1, dim).sqrt()
        return cls(*(part.view(layers, heads, dim) for part in (given.int(), starts.int(), steps)))

    def to(self, device: torch.device | str) -> BitTables:
        """The same, on a device."""
        return BitTables(*(part.to(device) for part in (self.widths, self.starts, self.steps)))

    def of(self, layer: int) -> BitTables:
        """Those of a layer, [KV heads, head dimension] each."""
        return BitTables(self.widths[layer], self.starts[layer], self.steps[layer])


def _paired(of_channels: torch.Tensor) -> torch.Tensor:
    """The mean of each channel and the one that positions rotate it into, half the head away."""
    first, second = of_channels.chunk(2, dim=-1)
    mean = (first + second) / 2
    return torch.cat([mean, mean], dim=-1)
