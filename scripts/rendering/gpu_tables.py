"""What a decode step asks of a device, counted without one."""

from __future__ import annotations

from benchmark.serving.measured import table as _table
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


def launches_of_building(selector: str) -> str:
    """Launches that a layer's part of the pages which a step has completed takes before the next."""
    now, behind = (
        next(row for row in results(file)["rows"] if row["selector"] == selector)
        for file in ("count_step", "count_step_completed")
    )
    return f"{(behind['launches_per_step'] - now['launches_per_step']) / now['layers']:.0f}"


def hidden_copies_table() -> str:
    """Predicted steps of equal answers: fewer pages that are waited for, and more whose copies are hidden."""
    rows = results("roofline")["rows"]
    few, many = sorted({row["budget"] for row in rows})[-2:]
    by_shape = {(row["context"], row["batch"], row["budget"]): row for row in rows}
    lines = []
    for context, batch in dict.fromkeys((row["context"], row["batch"]) for row in rows):
        waited, hidden = (by_shape[context, batch, budget] for budget in (few, many))
        cells = [f"{waited[name]:.1f}" for name in ("dense_ms", "link_ms", "waited_ms")]
        cells += [f"{hidden[name]:.1f}" for name in ("link_ms", "captured_ms")]
        fitting = f"{waited['dense_requests']} of {batch}" if waited["dense_requests"] < batch else str(batch)
        ratio = waited["waited_ms"] / hidden["captured_ms"]
        lines.append([f"{context:,}", fitting, *cells, f"{ratio:.2f}"])
    titles = ["context", "requests that fit dense", "dense, ms"]
    titles += [f"{few:.0%} read: {what}" for what in ("link", "waited for")]
    titles += [f"{many:.0%} read: {what}" for what in ("link", "hidden")]
    return _table([*titles, "times as fast"], lines)
