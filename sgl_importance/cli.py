"""`sgl-importance`: one command, whose sub-commands announce themselves as entry points."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points, version
from typing import Annotated

import typer

COMMANDS_GROUP = "sgl_importance.commands"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sgl-importance {version('sgl-importance')}")
        raise typer.Exit


def _root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Importance-guided KV cache tiering for SGLang."""


def build_app() -> typer.Typer:
    """Collects the sub-commands; the core knows none by name, so it never imports sglang."""
    app = typer.Typer(name="sgl-importance", no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_root)
    for command in sorted(entry_points(group=COMMANDS_GROUP), key=lambda point: point.name):
        app.add_typer(command.load(), name=command.name)
    return app


def main() -> None:
    try:
        build_app()()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith(("sgl_importance", "sglang_importance")):
            raise
        cure = "install it beside sgl-importance; scripts/setup.sh of a checkout installs everything"
        sys.exit(f"error: this command needs {package}, which is not installed: {cure}")
