"""How many bits each channel of a key gets, from what a model's keys and queries are like."""

from __future__ import annotations

from dataclasses import dataclass

import torch

STEPS = (0.0, 1.596, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
"""By bits, the step of the best uniform quantiser of a normal variable of deviation 1 (Max, 1960)."""
DISTORTIONS = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.00104, 0.0003035, 0.0000869)
"""What it leaves of the variance."""
MOST_BITS = len(STEPS) - 1
LARGEST = 127
"""Largest number of what is kept in int8."""
FACTORS_PER_DOUBLING = 8
"""How finely the factor of a page is kept, as the logarithm of it in int8."""
HEADER_BYTES = 4
"""Of what is kept of a page and KV head, between mean and codes: one is used, and words stay aligned."""

CALIBRATION_TOKENS = 1024
SKIPPED_TOKENS = 32
"""Last tokens of a context whose pages every query reads anyway: what it finds there decides on no bits."""


def calibration_tokens(vocabulary: int) -> torch.Tensor:
    """Token ids that a model's statistics are taken from, int64 [CALIBRATION_TOKENS]: random ones, twice.

    So they hang on the model alone, neither on a text nor on what is served; those of a text gave bits that
    chose no better. What stood there before is found again by the heads that look for it, whose choices
    matter most (induction heads, Olsson et al., 2022).
    """
    draws = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (CALIBRATION_TOKENS // 2,), generator=draws).repeat(2)


@dataclass(frozen=True, slots=True)
class KeyStatistics:
    """What decides on bits: of each layer, KV head and channel, float32 [layers, KV heads, head dimension].

    Attributes:
        variances: of keys around the mean of their page.
        energies: mean squares of the queries of the KV head's group, each query counting by the largest share
            of its attention that one page has which it does not read anyway.
        turns_halves: whether positions rotate each channel into the one half the head away, as rotary
            embeddings of whole heads in NeoX's order do.
    """

    variances: torch.Tensor
    energies: torch.Tensor
    turns_halves: bool = True

    @classmethod
    def of(cls, keys: torch.Tensor, queries: torch.Tensor, page_size: int) -> KeyStatistics:
        """Statistics of one text.

        Args:
            keys: of at least a page of tokens, rotated, [layers, tokens, KV heads, head dimension].
            queries: of the same tokens, scaled as attention scales them, [layers, tokens, heads, head
                dimension].
            page_size: tokens per page.
        """
        pages = keys.shape[1] // page_size
        keys = keys[:, : pages * page_size].float()
        variances = keys.unflatten(1, (pages, page_size)).var(dim=2, correction=0).mean(dim=1)
        groups = queries.float().unflatten(2, (keys.shape[2], -1))
        energies = [
            torch.stack([_energies(k[:, head], q[:, head], page_size) for head in range(k.shape[1])])
            for k, q in zip(keys, groups, strict=True)
        ]
        return cls(variances, torch.stack(energies))


def _energies(keys: torch.Tensor, queries: torch.Tensor, page_size: int) -> torch.Tensor:
    """Of one KV head: keys [tokens in whole pages, dimension], queries [all tokens, group, dimension]."""
    position = torch.arange(len(queries), device=keys.device)[:, None]
    key = torch.arange(len(keys), device=keys.device)
    page_end = key - key % page_size + page_size
    is_free = (key >= page_size) & (page_end <= position - SKIPPED_TOKENS)
    energies = torch.zeros_like(keys[0])
    for of_head in queries.unbind(dim=1):
        logits = (of_head @ keys.T).masked_fill(key > position, -torch.inf)
        shares = logits.softmax(dim=1).masked_fill(~is_free, 0.0)
        largest = shares.unflatten(1, (-1, page_size)).sum(dim=2).amax(dim=1)
        energies += (largest[:, None] * of_head.square()).mean(dim=0)
    return energies / queries.shape[1]


@dataclass(frozen=True, slots=True)
class BitTables:
    """How codes lie: [layers, KV heads, head dimension], or those of one layer.

    The codes of a token are one string of bits. A page keeps the first byte of each token, then the second of
    each, and so on. Channels of most bits come first, those of as many in their order.

    Attributes:
        widths: bits of each channel, from 0 to ``MOST_BITS``, int32; as many in all heads of a layer, and
            whole bytes.
        starts: before how many of a token's bits a channel's begin, the lowest first; int32.
        steps: of its codes, float32; 0 where it has none.
        channels: whose each bit of a token is, int16 [..., MOST_BITS * head dimension].
        worths: what a channel's number grows by with this bit, float32, likewise; 0 behind the last.
        usual: ``STEPS``, float32.
    """

    widths: torch.Tensor
    starts: torch.Tensor
    steps: torch.Tensor
    channels: torch.Tensor
    worths: torch.Tensor
    usual: torch.Tensor

    @staticmethod
    def num_bytes(layers: int, kv_heads: int, head_dim: int) -> int:
        """What all tables take."""
        return layers * kv_heads * head_dim * (3 * 4 + MOST_BITS * (2 + 4))

    @classmethod
    def allotted(cls, statistics: KeyStatistics, bits: int) -> BitTables:
        """Shares out the bits of all tokens, among layers and then, in each head, among channels.

        Each bit goes where it takes most from the error of products: variance within a page times the energy
        of queries times what the bit takes from the distortion. Two channels that a rotation turns into each
        other count as their mean, where that is known (``turns_halves``).

        Args:
            statistics: of the model.
            bits: of all channels of a token together, as a mean over layers; these have whole bytes, so
                that up to a byte in all is left.
        """
        variances, energies = statistics.variances, statistics.energies
        if statistics.turns_halves:
            variances, energies = _paired(variances), _paired(energies)
        layers, _, dim = variances.shape
        taken = -torch.tensor(DISTORTIONS, device=variances.device).diff()
        # Each bit of a channel takes less than the one before it: the best ones are its first.
        gains = ((variances * energies)[..., None] * taken).flatten(2)
        of_bytes = gains.sort(dim=2, descending=True).values.sum(dim=1).unflatten(1, (dim, 8)).sum(dim=2)
        best = of_bytes.flatten().topk(min(layers * bits // 8, of_bytes.numel())).indices
        of_layer = 8 * torch.bincount(best // dim, minlength=layers)
        widths = torch.stack(
            [
                torch.zeros_like(gain).scatter_(1, gain.topk(count, dim=1).indices, 1.0)
                for gain, count in zip(gains, of_layer.tolist(), strict=True)
            ]
        )
        given = widths.unflatten(2, (dim, MOST_BITS)).sum(dim=3).long()
        order = given.argsort(dim=2, descending=True, stable=True)
        in_order = given.gather(2, order)
        starts = torch.empty_like(given).scatter_(2, order, in_order.cumsum(dim=2) - in_order)
        steps = torch.tensor(STEPS, device=given.device)[given] * statistics.variances.sqrt()
        bit = torch.arange(MOST_BITS * dim, device=given.device).expand(layers, given.shape[1], -1)
        place = torch.searchsorted(in_order.cumsum(dim=2), bit.contiguous(), right=True)
        channels = order.gather(2, place.clamp(max=dim - 1))
        worths = steps.gather(2, channels) * (bit - starts.gather(2, channels)).exp2()
        worths = worths.where(place < dim, 0.0)
        usual = torch.tensor(STEPS, device=given.device)
        return cls(given.int(), starts.int(), steps.contiguous(), channels.short(), worths, usual)

    @property
    def bits(self) -> list[int]:
        """Bits of a token in each head of each layer."""
        found: list[int] = self.widths[:, 0].sum(dim=1).tolist()
        return found

    def to(self, device: torch.device | str) -> BitTables:
        """The same, on a device."""
        return BitTables(*(part.to(device) for part in (*self._by_layer(), self.usual)))

    def of(self, layer: int) -> BitTables:
        """Those of a layer, [KV heads, head dimension] each."""
        return BitTables(*(*(part[layer] for part in self._by_layer()), self.usual))

    def _by_layer(self) -> tuple[torch.Tensor, ...]:
        return self.widths, self.starts, self.steps, self.channels, self.worths


def _paired(of_channels: torch.Tensor) -> torch.Tensor:
    """The mean of each channel and the one that positions rotate it into, half the head away."""
    first, second = of_channels.chunk(2, dim=-1)
    mean = (first + second) / 2
    return torch.cat([mean, mean], dim=-1)
