"""What a decode step asks of a device, counted without one."""

from __future__ import annotations

from scripts.rendering.figures import results


def _most(file: str, number: str) -> float:
    return max(row[number] for row in results(file)["rows"])


def launches_a_layer() -> str:
    """Launches of a layer of a decode step over tiered pages, now and as it was."""
    now, before = (_most(file, "launches_per_layer") for file in ("count_step", "count_step_before"))
    return f"{now:.0f} launches where it made {before:.0f}"


def waits_a_step() -> str:
    """How often such a step waits for the device, now and as it was."""
    now, before = (_most(file, "host_syncs_per_step") for file in ("count_step", "count_step_before"))
    return f"{now:.0f} times where it waited {before:.0f} times"
