"""Numbers as the cells of tables show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def interval(
    found: Mapping[str, Any], value: str, low: str = "low", high: str = "high", form: str = ".2f"
) -> str:
    return f"{found[value]:{form}} ({found[low]:{form}} to {found[high]:{form}})"


def share(value: float) -> str:
    """Of one, as ``.052``."""
    return f"{value:.3f}".removeprefix("0")
