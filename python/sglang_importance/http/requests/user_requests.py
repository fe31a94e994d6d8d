"""When users' requests last began or ended: what tells whether a server is idle.

sglang's own time of the last message will not do: answers to ``/kv_importance`` and to health checks set it
too.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sgl_importance.observe.trace.arrivals import HEALTH_CHECK_PREFIX
from sglang_importance.placement.prewarm_request import is_prewarm

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_ATTRIBUTE = "kv_importance_user_requests"


@dataclass
class UserRequests:
    """Of one tokenizer manager.

    Attributes:
        noted: beginnings and ends so far.
        last: the time of the last of them, in seconds of the monotonic clock.
    """

    noted: int = 0
    last: float = field(default_factory=time.monotonic)

    def note(self) -> None:
        self.noted += 1
        self.last = time.monotonic()

    @property
    def quiet_seconds(self) -> float:
        """Since a request began or ended."""
        return time.monotonic() - self.last


def user_requests(manager: TokenizerManager) -> UserRequests:
    """What is known of the requests to a tokenizer manager."""
    known: UserRequests | None = getattr(manager, _ATTRIBUTE, None)
    if known is None:
        known = UserRequests()
        setattr(manager, _ATTRIBUTE, known)
    return known


def is_of_user(rid: str | list[str] | None) -> bool:
    """Whether a request is neither a step of a pre-warm nor a health check, which both name themselves."""
    return not (isinstance(rid, str) and (is_prewarm(rid) or rid.startswith(HEALTH_CHECK_PREFIX)))


async def noting(
    generate: Callable[..., AsyncGenerator[Any, None]], manager: TokenizerManager, obj: Any, request: Any
) -> AsyncGenerator[Any, None]:
    """Generates, and notes when a user's request begins and when it ends, in whatever way."""
    user_requests(manager).note()
    try:
        async with aclosing(generate(manager, obj, request)) as outputs:
            async for output in outputs:
                yield output
    finally:
        user_requests(manager).note()
