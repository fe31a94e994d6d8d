"""numba's compiler, as everything here calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def njit(*signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit``, cached where there is a place to write to: a container may have none and must serve.

    With a signature, a function is compiled, or loaded from the cache, when its module is imported and not
    in somebody's request.
    """

    compiled: Any = numba.njit  # its types know no list of options

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return compiled(*signature, cache=True, **options)(function)
        except RuntimeError:  # numba: no locator available
            return compiled(*signature, **options)(function)

    return decorate
