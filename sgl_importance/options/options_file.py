"""The file of ``--kv-importance-config``: options that are chosen once, if ever, by group."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sgl_importance.options.importance_options import CONFIG_FLAG, DEFAULTS, SETTINGS

AUTO_LAYERS = "auto"
"""The word for an empty list of layers."""
FILE_KEYS = tuple(place for place, setting in SETTINGS.items() if not setting.flag)
"""The options that this file takes."""


def read_config(path: str | Path) -> dict[str, Any]:
    """The options that a file chooses, by place.

    Raises:
        ValueError: it cannot be read, or has something that is no option of it; one line that names the cure.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except OSError as error:
        raise ValueError(f"{CONFIG_FLAG} {path}: {(error.strerror or str(error)).lower()}") from None
    except (RuntimeError, ValueError) as error:  # no such home, no UTF-8, no TOML
        raise ValueError(f"{CONFIG_FLAG} {path} is no TOML file: {error}") from None
    try:
        return config_values(document)
    except ValueError as error:
        raise ValueError(f"{CONFIG_FLAG} {path}: {error}") from None


def config_values(document: Mapping[str, Any]) -> dict[str, Any]:
    """The same from what such a file holds: groups with their keys.

    Raises:
        ValueError: names each key that is no option, and the nearest that is one.
    """
    given: dict[str, Any] = {}
    for group, values in document.items():
        if isinstance(values, Mapping):
            given |= {f"{group}.{key}": value for key, value in values.items()}
        else:
            given[group] = values
    if problems := [problem for place in given if (problem := _problem(place))]:
        raise ValueError("; ".join(problems))
    return {place: _value(place, value) for place, value in given.items()}


def _problem(place: str) -> str | None:
    if place in FILE_KEYS:
        return None
    if place in SETTINGS:
        return f"{place} is given as a flag: {SETTINGS[place].flag}"
    names = [each for each in FILE_KEYS if each.endswith(f".{place}")]
    if near := names or get_close_matches(place, FILE_KEYS, n=1):
        group, _, key = near[0].rpartition(".")
        return f"there is no {place}: did you mean {key} under [{group}]?"
    return f"there is no {place}: the keys are {', '.join(FILE_KEYS)}"


def _value(place: str, value: Any) -> Any:
    """As an option holds it; what does not fit stays as it is, and is refused there."""
    default = DEFAULTS[place]
    if isinstance(default, tuple):
        if value == AUTO_LAYERS:
            return ()
        given = value if isinstance(value, list | tuple) else (value,)
        return tuple(sorted(set(given))) if all(type(each) is int for each in given) else tuple(given)
    if isinstance(default, float) and type(value) is int:
        return float(value)
    return value
