"""The cost model: seconds to restore KV by recomputation or by a copy from a lower tier."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_importance.tiers import Tier


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds to restore tokens. Constants are frozen for the life of the server, so ranks agree.

    Prefill of n tokens behind d cached ones costs a*n + b*n*(d + n/2): every token passes the weights (a),
    and attends to all tokens before it (b).

    Attributes:
        prefill_seconds_per_token: a, in seconds.
        prefill_seconds_per_token_pair: b, in seconds.
        bytes_per_token: KV bytes of one token over all layers.
        host_bytes_per_second: host to device bandwidth.
        storage_bytes_per_second: storage to host bandwidth.
    """

    prefill_seconds_per_token: float
    prefill_seconds_per_token_pair: float
    bytes_per_token: int
    host_bytes_per_second: float
    storage_bytes_per_second: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} must be positive, not {value}")

    @classmethod
    def from_model(
        cls,
        *,
        parameters: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        bytes_per_token: int,
        flops_per_second: float,
        host_bytes_per_second: float,
        storage_bytes_per_second: float,
    ) -> CostModel:
        """Derives the prefill constants from shapes: 2 FLOPs per parameter and token, 4 per pair and lane."""
        return cls(
            prefill_seconds_per_token=2 * parameters / flops_per_second,
            prefill_seconds_per_token_pair=4 * num_layers * num_heads * head_dim / flops_per_second,
            bytes_per_token=bytes_per_token,
            host_bytes_per_second=host_bytes_per_second,
            storage_bytes_per_second=storage_bytes_per_second,
        )

    def recompute_seconds(self, tokens: int, depth: int) -> float:
        """Prefill time of ``tokens`` tokens that follow ``depth`` cached ones."""
        return tokens * (
            self.prefill_seconds_per_token + self.prefill_seconds_per_token_pair * (depth + tokens / 2)
        )

    def restore_seconds(self, tokens: int, depth: int, source: Tier | None) -> float:
        """Time to have ``tokens`` on the device again from ``source``; None means from nothing.

        A copy that is slower than computing would not be awaited, so recomputation bounds it.
        """
        if source is Tier.DEVICE:
            return 0.0
        recompute = self.recompute_seconds(tokens, depth)
        if source is None:
            return recompute
        size = tokens * self.bytes_per_token
        seconds = size / self.host_bytes_per_second
        if source is Tier.STORAGE:
            seconds += size / self.storage_bytes_per_second
        return min(seconds, recompute)

    def seconds_per_token(self, source: Tier | None) -> float:
        """``restore_seconds`` of one token at the start of a prompt; None means from nothing."""
        return self.restore_seconds(1, 0, source)
