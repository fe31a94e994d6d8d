"""A config.json that nobody vouches for: its values, checked one by one as they are asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sgl_importance.errors import ImportanceError

LARGEST = 1 << 24
"""Sizes above are taken for mistakes; the largest contexts have 10 million tokens."""
MOST_LAYERS = 4096


class SizeError(ImportanceError, ValueError):
    """No size can be said; the message is one line that names the cure."""


class Fields:
    """Values of a JSON object by name.

    A value that is missing is asked for, never assumed: the class that loads a model in transformers has
    defaults of its own, which differ from model to model.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str = "the config",
        *,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            defaults: of values that whoever wrote the config leaves out where they are these.
        """
        self._values = {**(defaults or {}), **values}
        self._where = where

    def __contains__(self, name: str) -> bool:
        """Whether the value is there, and not null."""
        return self._values.get(name) is not None

    def says(self, name: str) -> bool:
        """Whether the value is there, be it null."""
        return name in self._values

    def integer(self, name: str, *, low: int = 1, high: int = LARGEST) -> int:
        """
        Raises:
            SizeError: it is missing, or no whole number from ``low`` to ``high``.
        """
        value = self._required(name)
        if type(value) is not int or not low <= value <= high:
            raise SizeError(
                f"{self._where} has {name} {_shown(value)}: a whole number from {low} to {high} is needed"
            )
        return value

    def layers(self, name: str = "num_hidden_layers") -> int:
        """As ``integer``, of a model's layers."""
        return self.integer(name, high=MOST_LAYERS)

    def integer_or(self, name: str, default: int, *, low: int = 1) -> int:
        """As ``integer``, and the default where the value is missing or null."""
        return self.integer(name, low=low) if name in self else default

    def number(self, name: str, *, low: float, high: float) -> float:
        """
        Raises:
            SizeError: it is missing, or no number from ``low`` to ``high``.
        """
        value = self._required(name)
        if type(value) not in (int, float) or not low <= value <= high:
            raise SizeError(
                f"{self._where} has {name} {_shown(value)}: a number from {low:g} to {high:g} is needed"
            )
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """
        Raises:
            SizeError: it is there and neither true nor false.
        """
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise SizeError(f"{self._where} has {name} {_shown(value)}: true or false is needed")
        return value

    def word(self, name: str) -> str:
        """
        Raises:
            SizeError: it is missing or no string.
        """
        value = self._required(name)
        if not isinstance(value, str):
            raise SizeError(f"{self._where} has {name} {_shown(value)}: a word is needed")
        return value

    def words(self, name: str, known: Collection[str], length: int | None = None) -> list[str]:
        """A list of words, one for each layer.

        Raises:
            SizeError: it is missing, has another length, or a word that is not known.
        """
        value = self._required(name)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise SizeError(f"{self._where} has {name} {_shown(value)}: a list of words is needed")
        if len(value) > MOST_LAYERS or (length is not None and len(value) != length):
            layers = length if length is not None else f"at most {MOST_LAYERS}"
            raise SizeError(
                f"{self._where} has {len(value)} words in {name}, for {layers} layers: correct one"
            )
        strange = sorted(set(value) - set(known))
        if strange:
            raise SizeError(
                f"{self._where} has {_shown(strange[0])} in {name}: known are {', '.join(sorted(known))}"
            )
        return value

    def integers(self, name: str, *, low: int, high: int) -> list[int]:
        """
        Raises:
            SizeError: it is missing, or no list of whole numbers from ``low`` to ``high``.
        """
        value = self._required(name)
        whole = isinstance(value, list) and all(type(each) is int and low <= each <= high for each in value)
        if not whole:
            raise SizeError(
                f"{self._where} has {name} {_shown(value)}: a list of numbers from {low} to {high} is needed"
            )
        return list(value)

    def inner(self, name: str) -> Fields:
        """
        Raises:
            SizeError: it is missing or no object.
        """
        value = self._required(name)
        if not isinstance(value, dict):
            raise SizeError(f"{self._where} has {name} {_shown(value)}: an object is needed")
        return Fields(value, f"{name} of {self._where}")

    def completed(self, defaults: Mapping[str, Any]) -> Fields:
        """The same, with these values where it names none; null counts as named."""
        return Fields(self._values, self._where, defaults=defaults)

    def _required(self, name: str) -> Any:
        if name not in self:
            raise SizeError(
                f"{self._where} has no {name}: write a complete one with "
                "AutoConfig.from_pretrained(MODEL).to_json_file(FILE, use_diff=False), or add it"
            )
        return self._values[name]


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
