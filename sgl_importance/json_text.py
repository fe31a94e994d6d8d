"""Untrusted JSON: a value, or one line that says what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from sgl_importance.errors import ImportanceError

ValueT = TypeVar("ValueT")


class BadJson(ImportanceError, ValueError):
    """The JSON cannot be read; the message is one line."""


def read_json(text: str | bytes) -> Any:
    """
    Raises:
        BadJson: it is no JSON in UTF-8, nested too deeply, or has a number of too many digits.
    """
    return decode_json(json.loads, text)


def decode_json(decode: Callable[[Any], ValueT], text: str | bytes) -> ValueT:
    """The value of a text by ``decode``: ``json.loads``, or a decoder of msgspec's.

    Raises:
        BadJson: as ``read_json``, or it is no value of the decoder's type.
    """
    try:
        return decode(text)
    except RecursionError:
        raise BadJson("nested too deeply") from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise BadJson(" ".join(str(error).split())) from error
