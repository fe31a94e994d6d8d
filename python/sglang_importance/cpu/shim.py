"""A shim: one upstream defect, a test for it, and the smallest cure."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import ClassVar

logger = logging.getLogger(__name__)


class Shim(ABC):
    """Covers one defect of sglang, or of a package that it needs, on a machine without an accelerator.

    A shim is applied only while ``needed`` finds the defect, so that it steps aside when upstream mends it.

    Attributes:
        defect: what fails without the shim, and where (sglang 0.5.21).
    """

    defect: ClassVar[str]

    @abstractmethod
    def needed(self) -> bool:
        """Whether the defect is there; cheap, and without side effects on sglang."""

    @abstractmethod
    def apply(self) -> None:
        """Covers the defect in this process. Called at most once."""


def apply_needed(shims: tuple[Shim, ...]) -> list[str]:
    """Applies the shims whose defect is present; returns their class names."""
    applied = []
    for shim in shims:
        if shim.needed():
            shim.apply()
            applied.append(type(shim).__name__)
    return applied
