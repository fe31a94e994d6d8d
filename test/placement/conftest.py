"""Weights in memory, without which no ledger is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from support.drivers.ledgered_tree import weights_loaded

    with weights_loaded(monkeypatch):
        yield
