"""The former place of ``sgl_importance_lab.replay.policy_registry``, kept so that documented imports work."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    # Looked up when it is asked for: policies know nothing of the replay.
    return getattr(import_module("sgl_importance_lab.replay.policy_registry"), name)
