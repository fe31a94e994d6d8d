"""`sgl-importance`: one command, whose sub-commands announce themselves as entry points."""

from __future__ import annotations

import errno
import sys
from importlib.metadata import entry_points, version
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from sgl_importance.laboratory import COMMANDS as OF_THE_LABORATORY
from sgl_importance.laboratory import INSTALL
from sgl_importance.terminal import INTERRUPTED, interrupted, interrupts_behind_compilation, one_line

# Of click, or of the copy of it that newer versions of typer bring.
_UsageError: Any = typer.BadParameter.__mro__[1]
PROGRAM = "sgl-importance"
COMMANDS_GROUP = "sgl_importance.commands"
MOVED = {"pins": "pin list", "unpin": "pin rm"}
"""Commands of an earlier release, and what does their work now."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {version(PROGRAM)}")
        raise typer.Exit


def _root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Look at, and act on, the KV cache of SGLang servers with --kv-policy; measure it in the laboratory."""


class _Commands(TyperGroup):
    """The sub-commands; Ctrl-C in one of them is one line, where it did not say more itself."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            interrupted()

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in OF_THE_LABORATORY and self.get_command(ctx, args[0]) is None:
            _end(f"{PROGRAM} {args[0]} is of the laboratory, which is not installed: {INSTALL}", code=1)
        if args[0] in MOVED:
            _end(f"{PROGRAM} {args[0]} is now {PROGRAM} {MOVED[args[0]]}")
        if args[0] == "pin" and len(args) > 1 and args[1].startswith("--") and args[1] != "--help":
            _end(f"a prefix is pinned with {PROGRAM} pin add, which takes {args[1]}")
        return super().resolve_command(ctx, args)


def build_app() -> typer.Typer:
    """Collects the sub-commands; the core knows none by name, so it never imports sglang."""
    app = typer.Typer(name=PROGRAM, cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_root)
    commands = entry_points(group=COMMANDS_GROUP)
    # In the order of their panels in --help: those that operate a server first.
    for command in sorted(commands, key=lambda point: (point.name in OF_THE_LABORATORY, point.name)):
        panel = "Laboratory" if command.name in OF_THE_LABORATORY else "Operate a server"
        app.add_typer(command.load(), name=command.name, rich_help_panel=panel)
    return app


def main() -> None:
    """Runs the command of the command line; whatever the user can mend is one line on stderr."""
    try:
        with interrupts_behind_compilation():
            # Not standalone: what typer makes of an error is a box of five lines.
            code = build_app()(prog_name=PROGRAM, standalone_mode=False)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help, or it was printed already
            sys.exit(error.format_message().strip() or 2)
        command = error.ctx.command_path if error.ctx else PROGRAM
        problem = error.format_message().rstrip(".")
        cure = "give an address by --url" if "http" in problem else f"see {command} --help"
        _end(f"{problem}: {cure}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith(("sgl_importance", "sglang_importance")):
            raise
        cure = "install it beside sgl-importance; scripts/setup.sh of a checkout installs everything"
        _end(f"this command needs {package}, which is not installed: {cure}", code=1)
    except KeyboardInterrupt:  # while the commands were being loaded
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        where = f"{error.filename}: " if error.filename else "writing a result: "
        _end(f"{where}{(error.strerror or str(error)).lower()}")
    sys.exit(code)


def _end(message: str, *, code: int = 2) -> NoReturn:
    print(f"error: {one_line(message)}", file=sys.stderr)
    sys.exit(code)
