"""``sgl-importance`` as both pyproject.toml have it now, not as it was when the packages were installed."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).parents[2]


def tree_command(*names: str) -> Any:
    """The command with the sub-commands ``names``, or with all."""
    points: dict[str, str] = {}
    for folder in (ROOT, ROOT / "benchmark/lab"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        points |= project["entry-points"]["sgl_importance.commands"]
    app = typer.Typer(name="sgl-importance", pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    for name in names or points:
        module, _, attribute = points[name].partition(":")
        app.add_typer(getattr(import_module(module), attribute), name=name)
    return typer.main.get_command(app)


if __name__ == "__main__":
    tree_command(sys.argv[1])()
