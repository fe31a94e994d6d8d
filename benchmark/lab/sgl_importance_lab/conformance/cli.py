"""`sgl-importance conformance`: checks a producer or an accumulator against the specification."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer

from sgl_importance.terminal import fail
from sgl_importance_lab.conformance.check import DEFAULT_TOLERANCE, Verdict, check_accumulator, check_producer

app = typer.Typer(
    help="Check a producer or an accumulator against docs/spec.md.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
Target = Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help="Importable from here.")]


@app.command()
def producer(
    target: Target,
    tolerance: Annotated[
        float, typer.Option(min=0.0, max=0.1, help="The producer's stated bound on each value.")
    ] = DEFAULT_TOLERANCE,
) -> None:
    """FACTORY() returns a function from ProducerCase to BlockImportance."""
    made = _made(target)
    typer.echo(f"tolerance {tolerance:g}")
    _report(check_producer(made, tolerance=tolerance))


@app.command()
def consumer(target: Target) -> None:
    """FACTORY() returns a function from ConsumerCase to an empty accumulator."""
    _report(check_accumulator(_made(target)))


def _made(target: str) -> Callable[..., Any]:
    """Calls the factory that ``target`` names; its result."""
    module, _, name = target.partition(":")
    if not module or not name or module.startswith("."):
        fail(f"{target} names no factory: give MODULE:FACTORY")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(import_module(module), name)
    except ImportError as error:
        fail(f"cannot import {module} ({error}): install it, or start where it lies")
    except AttributeError:
        fail(f"{module} has no {name}")
    try:
        made = factory()
    except Exception as error:
        fail(f"{target}() raised {type(error).__name__}: {' '.join(str(error).split())}")
    if not callable(made):
        fail(f"{target}() returned {type(made).__name__}, which cannot be called with a case")
    return made  # type: ignore[no-any-return]


def _report(verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        typer.echo(f"pass  {verdict.case}" if verdict.passed else f"FAIL  {verdict.case}: {verdict.problem}")
    failed = sum(not verdict.passed for verdict in verdicts)
    typer.echo(f"{len(verdicts) - failed} of {len(verdicts)} cases pass")
    raise typer.Exit(1 if failed else 0)
