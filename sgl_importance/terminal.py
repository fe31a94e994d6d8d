"""Shared behaviour of all commands at the terminal: errors of one line, output files, progress on stderr."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

FILE_COLUMNS = 120
INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells report SIGINT."""
RETRY_SECONDS = 0.1
"""From one look whether numba still compiles to the next, after Ctrl-C."""


def fail(message: str) -> NoReturn:
    """Ends the command with one line and exit code 2."""
    typer.echo(f"error: {one_line(message)}", err=True)
    raise typer.Exit(2)


def one_line(message: str) -> str:
    """The message with escapes for what does not print: names that users give may hold line breaks."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in message)


def interrupted(done: str = "") -> NoReturn:
    """Ends the command after Ctrl-C with one line that says what was done by then."""
    typer.echo(f"interrupted {done}".rstrip(), err=True)
    raise typer.Exit(INTERRUPTED)


@contextmanager
def interrupts_behind_compilation() -> Iterator[None]:
    """Puts Ctrl-C off while numba compiles: LLVM drops what is raised while it calls back.

    For the main thread. Where Ctrl-C is ignored, as in a shell's background, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    before = signal.signal(signal.SIGALRM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    compiler: Any = sys.modules.get("numba.core.compiler_lock")  # nothing compiles before it is imported
    if compiler is not None and compiler.global_compiler_lock.is_locked():  # by this thread
        signal.setitimer(signal.ITIMER_REAL, RETRY_SECONDS)
    else:
        raise KeyboardInterrupt


def some_path(text: str) -> Path:
    """For ``parser`` of a typer argument: the path, unless it is empty, which would be the current folder.

    Raises:
        typer.BadParameter: it is empty.
    """
    if not str(text):
        raise typer.BadParameter("is empty: name a file or a directory")
    return Path(text)


def existing_file(text: str) -> Path:
    """For ``parser`` of a typer argument: a file, or a pipe, that is there.

    Raises:
        typer.BadParameter: it is not, or it is a directory.
    """
    path = some_path(text)
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a directory: name a file in it")
    if not path.exists():
        raise typer.BadParameter(f"{path} does not exist: correct the name")
    return path


def check_outputs(*files: Path | None) -> None:
    """Fails, before any work is done, where a file that was asked for cannot be written."""
    for file in files:
        if file is None:
            continue
        folder = file.resolve().parent
        if file.is_dir():
            fail(f"{file} is a directory: name a file in it")
        if not folder.is_dir():
            fail(f"no directory for {file}: create it first")
        if not os.access(file if file.exists() else folder, os.W_OK):
            fail(f"{file} cannot be written: change its permissions, or name another file")


@contextmanager
def counted(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar of so many steps, gone when they are done; call what it yields after each step."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


def plain(text: str, style: str = "") -> Text:
    """What others wrote, as it stands: rich would take brackets for markup, and drop or refuse them."""
    return Text(one_line(text), style)


def add_texts(table: Table, *cells: str | Text) -> None:
    """Adds a row to a table, each cell as it stands: any may hold what a user or another program wrote."""
    table.add_row(*(cell if isinstance(cell, Text) else plain(cell) for cell in cells))


def show(table: Table) -> None:
    """Prints a table, at full width where nobody's window limits it."""
    terminal = Console()
    Console(width=None if terminal.is_terminal else FILE_COLUMNS).print(table)
