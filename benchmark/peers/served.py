"""A server that answers, and what all of them are given alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

CHUNK = 512
AT_A_TIME = 8
HOST_RATIO = 2  # of the host tier to the device's pool
CONTEXT = 8_192  # SmolLM2's


def context(pool: int) -> int:
    """The longest sequence, tokens. vLLM starts only where one fits, and tells its pool in such."""
    return min(CONTEXT, pool)


def token_bytes(config: Mapping[str, int]) -> int:
    """KV of one token in float32, by the model's config.json."""
    return 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]


@dataclass(frozen=True)
class Served(ABC):
    """A server that answers.

    Attributes:
        pool: tokens of KV on the device, as the server itself says.
        pid: of the process that began all others of the server.
    """

    url: str
    model: str
    pool: int
    pid: int
    flags: list[str]

    @abstractmethod
    def empty(self) -> None:
        """Forgets every prefix, as a new server would."""

    def cpu_seconds(self) -> float:
        """Of all its processes since they began."""
        times = [process.cpu_times() for process in self._processes()]
        return sum(each.user + each.system for each in times)

    def memory_bytes(self) -> int:
        """Of all its processes; what several share counts once."""
        return sum(process.memory_full_info().pss for process in self._processes())

    def _processes(self) -> list[psutil.Process]:
        first = psutil.Process(self.pid)
        return [first, *first.children(recursive=True)]

    def missed(self) -> dict[str, float]:
        """Prompt tokens that were not found, by reason; ours alone says it."""
        return {}

    def predicted(self, requests: int) -> dict[str, int]:
        """Prompt tokens that shadows have found after so many requests; ``observe`` alone has some."""
        assert requests
        return {}
