"""What the laboratory, a distribution of its own, adds to this one: commands that measure, control arms."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from sgl_importance.errors import ImportanceError

INSTALL = "pip install './benchmark/lab' in a clone of sgl-importance"
COMMANDS = (
    "agree",
    "bench",
    "conformance",
    "kernels",
    "kv-size",
    "layers",
    "probe",
    "reason",
    "replay",
    "size",
    "study",
    "workload",
)
CONTROLS_GROUP = "sgl_importance.controls"


class MissingControlError(ImportanceError):
    """Nobody has installed the control arm that was asked for; the message names the cure."""


def load_control(name: str) -> Any:
    """What a server runs as a control arm of an experiment: a policy that ranks, or a selector of pages.

    Raises:
        MissingControlError: no installed distribution announces it.
    """
    for point in entry_points(group=CONTROLS_GROUP, name=name):
        return point.load()
    raise MissingControlError(f"control arms are of the laboratory, which is not installed: {INSTALL}")
