"""Flags, commands, metrics and versions, from the code and the pins."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from benchmark.serving.measured import table as _table

_ROOT = Path(__file__).resolve().parents[2]


def flag_reference() -> str:
    """Every flag of ours, and every key of the file of options: meaning, default, values and cost."""
    from sgl_importance.options.importance_options import CONFIG_FLAG, SETTINGS

    flags = [place for place, setting in SETTINGS.items() if setting.flag]
    keys = [place for place, setting in SETTINGS.items() if not setting.flag]
    flag_sections = [_option(f"### {SETTINGS[place].flag}", place) for place in flags]
    key_sections = [_option("### [{}] {}".format(*place.split(".")), place) for place in keys]
    config = (
        f"### {CONFIG_FLAG}\n\nA TOML file with the options below, each under its group. One that has a flag "
        "is refused there, and so is a key that does not exist, with the nearest that does."
    )
    return "\n\n".join(
        ["## Flags", *flag_sections, config, f"## Keys in the file of {CONFIG_FLAG}", *key_sections]
    )


def _option(title: str, place: str) -> str:
    from sgl_importance.options.importance_options import DEFAULTS, SETTINGS
    from sglang_importance.attention.score_sources import SOURCES

    setting, default = SETTINGS[place], DEFAULTS[place]
    shown = {(): "auto", "": "none"}.get(default, default)
    unit = f" {setting.unit}" if setting.unit and shown != "auto" else ""
    values = ", ".join(f"`{source}`" for source in SOURCES) if place == "source" else _values(setting)
    process = "scheduler and launcher" if setting.process == "both" else setting.process
    facts = [f"`{shown}`{unit}", values, process, _words(setting.cost) or "nothing"]
    meaning = setting.help[0].upper() + setting.help[1:]
    return f"{title}\n\n{_words(meaning)}.\n\n{_table(['default', 'takes', 'acts in', 'costs'], [facts])}"


def _words(text: str) -> str:
    """Help for a terminal, with its words and flags as code."""
    text = re.sub(r"'([\w.*-]+)'", r"`\1`", text)
    return re.sub(r"(?<![`\w])(--[a-z-]+(?: (?:default|observe|importance))?)(?![`\w])", r"`\1`", text)


def _values(setting: Any) -> str:
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    if setting.unit is None:
        return "a directory" if setting.help.startswith("directory") else "a word"
    bounds = [f"above {setting.minimum:g}" if setting.above_minimum else f"at least {setting.minimum:g}"]
    if setting.maximum < float("inf"):
        bounds.append(f"at most {setting.maximum:g}")
    return ", ".join(bounds)


def metrics_table() -> str:
    """Every series of ``/metrics``."""
    from sgl_importance.metrics_table import METRICS

    rows = ["| series | type | labels | meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = "; ".join(
            f"`{label}`: {', '.join(values) or 'as it comes'}" for label, values in metric.labels.items()
        )
        rows.append(f"| `{metric.exported_name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows)


def command_reference() -> str:
    """Help of every command, by typer's own generator."""
    import typer
    from typer.cli import get_docs_for_click

    from support.tree_command import tree_command

    command = tree_command()
    pages = []
    for name in sorted(command.commands):
        context = typer.Context(command, info_name="sgl-importance")
        page = get_docs_for_click(
            obj=command.commands[name], ctx=context, indent=1, name=name, call_prefix="sgl-importance"
        )
        pages.append(re.sub(r"^\* `--help`: .*\n", "", page, flags=re.MULTILINE))
    text = "\n".join(pages)
    # An option group of which only the help was left.
    text = re.sub(r"\*\*Options\*\*:\n\n+(?=(\*\*|#|\Z))", "", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _project() -> Any:
    return tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]


def python_versions() -> str:
    return str(_project()["requires-python"]).replace(">=", "at least ")


def pinned(package: str) -> str:
    """The version of a package that everything here was run with."""
    pins = (_ROOT / "scripts/pins-cpu.txt").read_text() + (_ROOT / "scripts/pins-kernels.txt").read_text()
    (found,) = re.findall(rf"^{re.escape(package)}==([^\s;]+)", pins, re.MULTILINE)
    return str(found)
