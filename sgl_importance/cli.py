"""`sgl-importance`: one command, whose sub-commands announce themselves as entry points."""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

COMMANDS_GROUP = "sgl_importance.commands"


def build_app() -> typer.Typer:
    """Collects the sub-commands; the core knows none by name, so it never imports sglang."""
    app = typer.Typer(
        name="sgl-importance",
        help="Importance-guided KV cache tiering for SGLang.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    for command in sorted(entry_points(group=COMMANDS_GROUP), key=lambda point: point.name):
        app.add_typer(command.load(), name=command.name)
    return app


def main() -> None:
    build_app()()
