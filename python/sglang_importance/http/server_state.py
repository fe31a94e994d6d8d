"""The server of this HTTP process, as sglang keeps it, and the mark of routes that want its key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from sglang.srt.entrypoints.http_server import get_global_state
from sglang.srt.managers.multi_tokenizer_mixin import MultiTokenizerRouter
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.auth import AuthLevel, auth_level

Route = TypeVar("Route", bound=Callable[..., Awaitable[Any]])


def tokenizer_manager() -> TokenizerManager:
    """Tokenizes requests and sends them to the scheduler."""
    manager = get_global_state().tokenizer_manager
    assert not isinstance(manager, MultiTokenizerRouter), "tokenizer workers serve, not their launcher"
    return manager


def server_arguments() -> Any:
    """sglang's ``ServerArgs``, whose fields are put together at import, where no type checker sees them."""
    return tokenizer_manager().server_args


def wants_key(route: Route) -> Route:
    """Marks a route: where the server has a key, or one for its administrator, callers must send it."""
    marked: Route = auth_level(AuthLevel.ADMIN_OPTIONAL)(route)
    return marked
