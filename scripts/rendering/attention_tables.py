"""What trained models' attention says, of ``benchmark/results/findings``."""

from __future__ import annotations

from typing import Any

from benchmark.serving.measured import table as _table
from scripts.rendering.cells import interval as _interval
from scripts.rendering.figures import results

_MODEL = "smollm2"
"""The one that a figure is of unless another is named."""
_SHOWN_LAYERS: dict[str, tuple[int, ...]] = {
    "smollm2": (0, 12, 14, 17, 18, 20, 21, 22, 23, 24, 29),
    "gemma3-270m": (5, 11, 17),
}

Interval = tuple[float, float, float]


def trained_study(part: str, study: str = "", model: str = _MODEL) -> dict[str, Any]:
    """A study of a trained model: its folder, and its name where that is another."""
    found: dict[str, Any] = results(f"findings/{model}/{part}/{study or part}")
    return found


def trained_interval(part: str, study: str = "", model: str = _MODEL) -> Interval:
    """The value of such a study with its interval."""
    value = trained_study(part, study, model)["value"]
    return value["value"], value["low"], value["high"]


def trained_n(part: str, study: str = "", model: str = _MODEL) -> int:
    """Units that its interval rests on."""
    return int(trained_study(part, study, model)["value"]["n"])


def trained_answers(setting: str, value: str, whose: str, model: str = _MODEL) -> Interval:
    """Share of questions whose answer lies in the top pages of their ``own`` or of ``earlier`` attention."""
    (found,) = (
        row
        for row in trained_study("sensitivity", model=model)["rows"]
        if (row["setting"], row["value"]) == (setting, value)
    )
    return found[f"{whose} answer"], found[f"{whose}_low"], found[f"{whose}_high"]


def layers_asked(model: str = _MODEL) -> tuple[int, int]:
    """Questions that the model answered, and that it was asked."""
    found = results(f"findings/{model}/layers")
    return found["answered"], found["asked"]


def layers_found(window: int, which: str, model: str = _MODEL) -> Interval:
    """Share of answers that layers find: those ``together`` that were chosen, or ``beside`` them."""
    windows = results(f"findings/{model}/layers")["windows"]
    (found,) = (each[which] for each in windows if each["window"] == window)
    return found["value"], found["low"], found["high"]


def layers_table(model: str = _MODEL) -> str:
    """Share of questions whose answer stands in a layer's best pages, by tokens observed."""
    found = results(f"findings/{model}/layers")
    windows = found["windows"]

    def line(name: str, estimates: list[dict[str, float]]) -> list[str]:
        return [name, *(_interval({**each, "share": each["value"]}, "share") for each in estimates)]

    shown = _SHOWN_LAYERS[model]
    # Of a model whose other layers have a window, only those that see everything were looked at.
    places = shown if len(windows[0]["by_layer"]) > len(shown) else range(len(shown))
    of_layers = zip(shown, places, strict=True)
    lines = [line(f"layer {layer}", [each["by_layer"][at] for each in windows]) for layer, at in of_layers]
    best = windows[0]["chosen"]
    lines.append(line(f"chosen with each window ({_listed(best)} with 1)", [w["together"] for w in windows]))
    lines.append(line(f"default ({_listed(found['compared'])})", [each["beside"] for each in windows]))
    return _table(["layers", *(f"{each['window']} tokens observed" for each in windows)], lines)


def trained_g_table() -> str:
    """Token hit rates with g, without, and with another node's; default layers, then those that find."""
    lines = []
    for model, shown in (("smollm2", "SmolLM2"), ("gemma3-270m", "Gemma 3")):
        for part, name in (("g", "default"), ("g-answering", "those that find the answer")):
            for row in trained_study(part, "g", model)["rows"]:
                if row["workload"] == "all":
                    rates = [f"{row[arm]:.3f}" for arm in ("lru", "ours", "g1", "shuffled")]
                    gain = _interval(row, "ours-g1", form=".3f")
                    lines.append([shown, name, f"{row['capacity']:.0%}", *rates, gain])
    names = ["model", "layers", "capacity", "LRU", "ours", "ours, g = 1", "ours, g shuffled"]
    return _table([*names, "ours - (g = 1)"], lines)


def trained_steps_table() -> str:
    """H1 at the share and the budget that decide."""
    policies = ["lru", "lfu", "recency+sinks", "ema", "window", "combined", "optimum"]
    lines = []
    for row in trained_study("h1")["rows"]:
        if (row["top"], row["budget"]) == (0.1, 0.2):
            rates = [f"{row[policy]:.3f}" for policy in policies]
            gain = _interval(row, "ema-lru", form=".3f")
            lines.append([row["workload"], row["context"], str(row["streams"]), *rates, gain])
    return _table(["steps", "context, tokens", "streams", *policies, "EMA - LRU"], lines)


def trained_agreement_table() -> str:
    """H2 by recording."""
    rows = trained_study("h2")["rows"]
    return _table(
        ["recording", "contexts", "queries", "Jaccard", "chance"],
        [
            [
                r["workload"],
                str(r["contexts"]),
                str(r["queries"]),
                _interval(r, "jaccard"),
                f"{r['chance']:.2f}",
            ]
            for r in rows
        ],
    )


def trained_residency_table() -> str:
    """Loads for each page read, and loads and attention of LRU's, of two layers of the trained model."""
    lines = []
    for row in results(f"findings/{_MODEL}/h3/h3_layers_12_18")["rows"]:
        ratios = [
            _interval({**row[name], name: row[name]["value"]}, name) for name in ("of_lru", "mass_of_lru")
        ]
        of_kinds = [f"{row[kind]:.2f}" for kind in ("records", "repeats")]
        lines.append(
            [
                f"`{row['policy']}`",
                f"{row['bias']:g}",
                f"{row['loaded']:.3f}",
                ratios[0],
                *of_kinds,
                ratios[1],
            ]
        )
    return _table(
        [
            "policy",
            "bias",
            "loaded of read",
            "of LRU's",
            "records alone",
            "repeats alone",
            "attention, of LRU's",
        ],
        lines,
    )


def trained_loads(policy: str, bias: float = 0.0, what: str = "of_lru") -> Interval:
    """Loads of a policy in parts of LRU's; or ``mass_of_lru``, attention on what it read."""
    rows = results(f"findings/{_MODEL}/h3/h3_layers_12_18")["rows"]
    (found,) = (row[what] for row in rows if (row["policy"], row["bias"]) == (policy, bias))
    return found["value"], found["low"], found["high"]


def trained_chosen_table() -> str:
    """Loads for each page that ``bits`` chose, in brackets of LRU's."""
    rows = results(f"findings/{_MODEL}/residency-chosen")
    shares = sorted({row["of_context"] for row in rows})
    cells = {(row["policy"], row["of_context"]): row["loaded_share"] for row in rows}
    return _table(
        ["policy", *(f"room for {share:.0%}" for share in shares)],
        [
            [
                f"`{policy}`",
                *(f"{cells[policy, at]:.3f} ({cells[policy, at] / cells['lru', at]:.2f})" for at in shares),
            ]
            for policy in dict.fromkeys(row["policy"] for row in rows)
        ],
    )


def gemma_loads(policy: str) -> str:
    """Loads for each page that Gemma 3 read, with room for a fifth of the context."""
    (found,) = (
        row["loaded_share"]
        for row in results("findings/gemma3-270m/residency-chosen")
        if row["policy"] == policy and 0.19 < row["of_context"] < 0.21
    )
    return f"{found:.2f}"


def prune_windows() -> int:
    """Windows of text that pruning was measured on."""
    return int(results("pages_prune")["rows"][0]["windows"])


def prune_table() -> str:
    """What pruning reads and loses, beside smaller budgets."""
    lines = []
    for row in results("pages_prune")["rows"]:
        cells = [_interval({**row[kind], kind: row[kind]["value"]}, kind, form=".3f") for kind in _KINDS]
        lines.append([f"`{row['arm']}`", *cells, f"{row['records_kept']} of {row['records']}"])
    return _table(["`bits`", "read", "quoted passages", "ordinary text", "records", "records kept"], lines)


_KINDS = ("read", "quoted", "plain", "record")


def _listed(layers: list[int]) -> str:
    return ", ".join(map(str, layers))
