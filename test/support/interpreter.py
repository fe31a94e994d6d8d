"""Triton's interpreter, without most of what it does twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def patch_once_a_launch() -> None:
    """Lets the interpreter replace Triton's language once a launch for each module of functions.

    It does so at every call of a function that a kernel calls, where all is replaced already: a third of its
    time goes into looking through the language again.
    """
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(function: Callable[..., Any]) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return None
        patched.add(module)
        return patch(function)

    def launch_anew(executor: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(executor, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew
