"""The tree driver, with its scripted scores in place of an attention backend's rows."""

from __future__ import annotations

import pytest

from support.drivers.tree_driver import TreeDriver


@pytest.fixture
def make_driver() -> type[TreeDriver]:
    return TreeDriver
