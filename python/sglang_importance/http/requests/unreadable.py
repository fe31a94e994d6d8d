"""Errors of sglang's own code at what a client wrote, where it expects something else.

The tables of ``fields`` are to name each; what they miss is still the client's error, not the server's.
"""

from __future__ import annotations

import logging
import re
import traceback

import jinja2
import msgspec
from fastapi import HTTPException
from starlette.datastructures import State

from sglang_importance.http.requests.fields.bad_field import BadField

UNREADABLE = (
    *(TypeError, AttributeError, LookupError, AssertionError, ArithmeticError, UnicodeError, RecursionError),
    *(re.error, msgspec.MsgspecError, jinja2.TemplateError),
)
"""What Python raises at a value of another shape; none of them says that a machine has failed."""


logger = logging.getLogger(__name__)


def refusal(error: BaseException) -> HTTPException:
    """The answer to a request at which a route has raised.

    sglang serves without a handler whose packages it cannot import, and looks for it with the first request:
    that is not the client's error.
    """
    if isinstance(getattr(error, "obj", None), State):
        detail = "sglang has not loaded what answers this route: its log says why, where the server started"
        return HTTPException(status_code=501, detail=detail)
    return HTTPException(status_code=400, detail=unreadable(error))


def unreadable(error: BaseException) -> str:
    """The one line of a refusal; the log has the place in sglang, for whoever adds the missing row.

    A plain ``ValueError`` is sglang's own word on a request, and says what is wrong; so is a ``RuntimeError``
    of its profiler.
    """
    if type(error) in (ValueError, RuntimeError) or isinstance(error, BadField):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = ", ".join(f"{each.filename}:{each.lineno}" for each in place)
    logger.warning("KV importance: sglang cannot read a request: %s at %s", type(error).__name__, where)
    said = " ".join(str(error).split())[:200]
    return f"sglang cannot read this request ({type(error).__name__}: {said}): look at its fields' types"
