"""Check that the installed sglang has what this package calls, overrides and hooks."""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from sglang_importance.upstream.refusal import TESTED_VERSIONS, LaunchRefused, cure
from sglang_importance.upstream.symbols import ALTERNATIVES, SYMBOLS

logger = logging.getLogger(__name__)

CURE = cure()


def version_problem() -> str | None:
    """One line where sglang is not installed; None where it is."""
    try:
        metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return f"sglang is not installed: {CURE}"
    return None


def version_note() -> str | None:
    """One line on an installed release of sglang that nobody has tested; None where somebody has."""
    found = metadata.version("sglang")
    if found in TESTED_VERSIONS:
        return None
    tested = ", ".join(TESTED_VERSIONS)
    return (
        f"sglang {found} has every symbol that sgl-importance needs, but nobody has tested them together; "
        f"tested are {tested}"
    )


def symbol_problems(
    symbols: Mapping[str, str | tuple[str, ...] | None] = SYMBOLS,
    alternatives: Sequence[tuple[str, ...]] = ALTERNATIVES,
) -> list[str]:
    """One line for every symbol that is missing or has other parameters than we count on."""
    problems = [problem for path, expected in symbols.items() if (problem := _problem(path, expected))]
    for paths in alternatives:
        if all(_problem(path, None) for path in paths):
            problems.append(f"sglang has none of {', '.join(paths)}: {CURE}")
    return problems


def check_sglang() -> None:
    """Admits a sglang that has what we need, and warns where nobody has tested that release.

    Raises:
        LaunchRefused: it is not there, or a symbol of it is not as we expect it; one line for each.
    """
    version = version_problem()
    if problems := [version] if version else symbol_problems():
        raise LaunchRefused(problems)
    if note := version_note():
        logger.warning(note)


def _problem(path: str, expected: str | tuple[str, ...] | None) -> str | None:
    try:
        symbol = _resolve(path)
    except (ImportError, AttributeError) as error:
        return f"sglang has no {path} ({error}): {CURE}"
    if expected is None:
        return None
    try:
        found = parameters(symbol)
    except (TypeError, ValueError):
        return f"sglang's {path} is no function: {CURE}"
    known = (expected,) if isinstance(expected, str) else expected
    if found in known:
        return None
    return f"sglang's {path} takes ({found}), not {' or '.join(f'({each})' for each in known)}: {CURE}"


def _resolve(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except AttributeError:
        # A field without default is no attribute of its class.
        owner, _, name = path.rpartition(".")
        annotations = inspect.get_annotations(pkgutil.resolve_name(owner))
        if name not in annotations:
            raise
        return annotations[name]


def parameters(function: Any) -> str:
    """Parameter names as in a signature: ``"self, node, *, target"``."""
    prefixes: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(name.startswith("*") for name in names):
            names.append("*")
        names.append(prefixes.get(parameter.kind, "") + parameter.name)
    return ", ".join(names)
