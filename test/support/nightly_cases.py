"""Cases of a parametrised test of which the first run every day, and the others with ``-m nightly``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest


def rest_nightly(values: Iterable[Any], *, daily: int = 1) -> list[Any]:
    """For ``pytest.mark.parametrize``: the values in their order, from the one behind ``daily`` on nightly.

    A tuple is the values of several arguments, as there.
    """
    rest = iter(values)
    first = list(islice(rest, daily))
    later = [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.nightly)
        for each in rest
    ]
    return [*first, *later]
