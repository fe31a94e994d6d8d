"""A server that answers, and what all of them are given alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

CHUNK = 512
AT_A_TIME = 8
HOST_RATIO = 2  # of the host tier to the device's pool
CONTEXT = 8_192  # SmolLM2's


def context(pool: int) -> int:
    """The longest sequence, tokens. vLLM starts only where one fits, and tells its pool in such."""
    return min(CONTEXT, pool)


@dataclass(frozen=True)
class Served(ABC):
    """A server that answers.

    Attributes:
        pool: tokens of KV on the device, as the server itself says.
    """

    url: str
    model: str
    pool: int
    flags: list[str]

    @abstractmethod
    def empty(self) -> None:
        """Forgets every prefix, as a new server would."""

    def missed(self) -> dict[str, float]:
        """Prompt tokens that were not found, by reason; ours alone says it."""
        return {}

    def predicted(self, requests: int) -> dict[str, int]:
        """Prompt tokens that shadows have found after so many requests; ``observe`` alone has some."""
        assert requests
        return {}
