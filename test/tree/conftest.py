"""The tree driver, with its scripted scores in place of an attention backend's rows."""

from __future__ import annotations

import pytest

import sglang_importance.tree.folding as folding_module

from driver import TreeDriver


@pytest.fixture
def make_driver(monkeypatch: pytest.MonkeyPatch):
    def make(*args, **kwargs) -> TreeDriver:
        driver = TreeDriver(*args, **kwargs)
        monkeypatch.setattr(folding_module, "active_rows", lambda: driver.rows)
        return driver

    return make
