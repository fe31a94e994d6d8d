"""One option: what it means, which values it takes, and where an operator writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

LARGEST = 2**62
"""Largest number that an option takes: nobody means a larger one, and arithmetic works with it."""
METADATA_KEY = "setting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Meaning and values of one option; its flag or its key, and its checks, are derived from this.

    Attributes:
        help: what ``--help`` says, without unit and default.
        flag: the flag on the command line; empty where it is a key in the file of ``--kv-importance-config``.
        unit: unit of a number; None for a word.
        minimum: smallest number allowed.
        maximum: largest number allowed.
        above_minimum: whether the minimum itself is already too small.
        whole: whether a number must be whole.
        choices: the words allowed; empty where they are not known here.
        replaced: words of the last release, and what each of them now means.
        is_path: whether it names a file or a directory.
        process: where the option acts. The launcher, which serves HTTP, checks every one.
        cost: what it takes from requests, memory, disk or privacy; empty where nothing.
    """

    help: str
    flag: str = ""
    unit: str | None = None
    minimum: float = -math.inf
    maximum: float = math.inf
    above_minimum: bool = False
    whole: bool = True
    choices: tuple[str, ...] = ()
    replaced: Mapping[str, str] = field(default_factory=dict)
    is_path: bool = False
    process: Literal["scheduler", "launcher", "both"] = "scheduler"
    cost: str = ""

    def problem(self, value: object) -> str | None:
        """The problem with ``value``, to go on with behind the option's name; None where there is none."""
        if self.choices:
            return (
                None if value in self.choices else f"must be one of {', '.join(self.choices)}, not {value!r}"
            )
        if self.unit is None:
            if not isinstance(value, str):
                return f"must be a word, not {value!r}"
            if self.is_path and not has_home(value):
                return f"{value!r} is in the home of no user here: write the whole path"
            return None
        numbers = value if isinstance(value, tuple) else (value,)
        if all(self._allows(number) for number in numbers):
            return None
        kind = "a whole number" if self.whole else "a number"
        bound = "above" if self.above_minimum else "of at least"
        is_huge = any(isinstance(number, int) and number > LARGEST for number in numbers)
        most = LARGEST if is_huge else self.maximum
        limit = f" and at most {most:g}" if math.isfinite(most) else ""
        return f"must be {kind} {bound} {self.minimum:g}{limit} ({self.unit}), not {value!r}"

    def _allows(self, number: object) -> bool:
        if isinstance(number, bool) or not isinstance(number, int if self.whole else int | float):
            return False
        if abs(number) > LARGEST or not number <= self.maximum:  # not a number is neither
            return False
        return number > self.minimum if self.above_minimum else number >= self.minimum


def option(default: Any, **facts: Any) -> Any:
    """A field of a group of options.

    Args:
        default: its value where nobody chose one.
        **facts: of its ``Setting``.
    """
    return field(default=default, metadata={METADATA_KEY: Setting(**facts)})


def has_home(path: str) -> bool:
    """Whether a ``~`` at the start of a path, if there is one, stands for somebody's home."""
    try:
        Path(path).expanduser()
    except RuntimeError:  # as pathlib says it
        return False
    return True
