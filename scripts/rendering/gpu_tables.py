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


def launches_of_building(selector: str, *, per_layer: bool = False) -> str:
    """Launches that pages which a step has completed take before the next: of all layers, or of one."""
    now, behind = (
        next(row for row in results(file)["rows"] if row["selector"] == selector)
        for file in ("count_step", "count_step_completed")
    )
    launches = behind["launches_per_step"] - now["launches_per_step"]
    return f"{launches / (now['layers'] if per_layer else 1):.0f}"


def layer_to_dense(requests: int) -> str:
    """Time of a tiered layer over that of dense attention, contexts of 32k."""
    (row,) = (row for row in results("step_parts")["rows"] if row["requests"] == requests)
    return f"{1 / row['times_dense']:.2f}"


def selected_tokens() -> str:
    """Tokens that each request of such a layer reads."""
    (selected,) = {row["selected"] for row in results("step_parts")["rows"]}
    return f"{selected:,}"


def step_parts_table() -> str:
    """Microseconds of each launch of a tiered layer, beside dense attention."""
    parts = ("scan", "choose", "place", "attend", "sum", "dense")
    lines = [
        [f"{row['context']:,} x {row['requests']}", *(f"{row[f'{part}_us']:.0f}" for part in parts)]
        for row in results("step_parts")["rows"]
    ]
    return _table(["context x requests", *parts], lines)


def served_steps_table() -> str:
    """Milliseconds of a step, by arm of a server."""
    rows = [row for row in results("served_steps")["rows"] if "step_ms" in row]
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    times = {(row["arm"], row["context"], row["requests"]): row for row in rows}
    lines = []
    for context, requests in dict.fromkeys((row["context"], row["requests"]) for row in rows):
        found = [times.get((arm, context, requests)) for arm in arms]
        cells = ["" if row is None else f"{row['step_ms']:.1f}" for row in found]
        lines.append([f"{context:,} x {requests}", *cells])
    titles = ["in graphs" if arm == "tiered" else arm.removeprefix("tiered, ") for arm in arms]
    return _table(["context x requests", *(f"tiered, {title}" for title in titles)], lines)


def answers_on_a_gpu() -> str:
    """Questions that each way of serving answered right, as stock did."""
    ((answers, right, as_stock),) = {
        (row["answers"], row["right"], row["as_stock"]) for row in results("served_answers")["rows"]
    }
    assert answers == right == as_stock
    return f"{right} of {answers}"


def _ratios(which: str, ratio: str) -> str:
    found = [
        row[ratio]
        for row in results("kernels")["rows"]
        if row.get("arm") in (f"{which}together", f"{which}in turns", which) and row["path"] == "tensor cores"
    ]
    return f"{min(found):.3f} to {max(found):.3f}"


def emitting_layer() -> str:
    """Time of a layer that emits logits, over stock's, on the path that sglang takes."""
    return _ratios("emitting", "to_stock")


def model_step(probe: str = "") -> str:
    """A model's step whose requests are observed, over stock's."""
    return _ratios(f"whole step, {probe}", "to_model_step")


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
