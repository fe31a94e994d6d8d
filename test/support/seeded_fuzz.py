"""Seeded examples of Hypothesis, thrown at something that is alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

every_run_and_nightly = pytest.mark.parametrize(
    "share", [pytest.param(1, id="some"), pytest.param(20, id="many", marks=pytest.mark.nightly)]
)
"""Parametrizes ``share``, by which a test multiplies the examples that every run has time for."""

requests_or_nightly = pytest.mark.parametrize(
    "count", [pytest.param(60, id="some"), pytest.param(20_000, id="many", marks=pytest.mark.nightly)]
)
"""Parametrizes the number of requests that a test sends."""


def fuzz(check: Callable[..., None], *examples: SearchStrategy[Any], count: int) -> None:
    """Calls ``check`` with the same ``count`` examples in every run.

    Failing examples are not made smaller: what was sent before may matter, and a dead server fails them all.
    """
    seeded = settings(
        derandomize=True,
        max_examples=count,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    seeded(given(*examples)(check))()
