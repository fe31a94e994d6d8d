"""What sglang answers to a body that its models refuse, at a bounded length.

Its handler writes every error twice, each with the input that it is about: a list of 100,000 wrong elements
makes an answer of hundreds of megabytes.
"""

from __future__ import annotations

from reprlib import Repr
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response

from sglang_importance.http.server_state import tokenizer_manager
from sglang_importance.upstream.server_options import importance_options

MOST_ERRORS = 8
"""The first of them are told; a client that mends these sees the next."""
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def shorten_errors(app: FastAPI) -> None:
    """Puts a bound on the errors that the app's own handler of refused bodies is given."""
    answer: Any = app.exception_handlers[RequestValidationError]

    async def answer_shortly(request: Request, error: RequestValidationError) -> Response:
        if importance_options(tokenizer_manager().server_args) is not None:
            error = RequestValidationError([_shortened(each) for each in error.errors()[:MOST_ERRORS]])
        response: Response = await answer(request, error)
        return response

    app.exception_handlers[RequestValidationError] = answer_shortly


def _shortened(error: dict[str, Any]) -> dict[str, Any]:
    if isinstance(error.get("input"), int | float | bool | None):
        return error
    return {**error, "input": _SHORT.repr(error["input"])} if "input" in error else error
