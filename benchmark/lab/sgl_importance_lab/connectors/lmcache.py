"""LMCache evicts by importance: a cache policy of its own kind, asked through ``get_importance``.

Written against LMCache 0.5.6 (``lmcache.v1.storage_backend.cache_policy``): its CPU, disk and NIXL backends
take their policy from one table by name. Call ``register`` before the engine is built and ``watch_tokens``
after it, and configure ``cache_policy: IMPORTANCE``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from importlib import import_module
from itertools import islice
from types import ModuleType
from typing import Any

from sgl_importance.errors import ImportanceError
from sgl_importance.interface import ImportanceSource
from sgl_importance_lab.connectors.chunks import WINDOW, ChunkDirectory, ChunkRanking

__all__ = ["POLICY_NAME", "LMCacheMissing", "register", "watch_tokens"]

POLICY_NAME = "IMPORTANCE"
_POLICIES = "lmcache.v1.storage_backend.cache_policy"

Namespace = Callable[[Mapping[str, Any] | None], tuple[str | None, str | None]]
"""From LMCache's ``request_configs`` to the extra key and cache salt of the pages on the server."""


class LMCacheMissing(ImportanceError, ImportError):
    """LMCache is not installed, or has no cache policies where we look for them."""


def register(source: ImportanceSource, *, page_size: int, chunk_tokens: int) -> ChunkDirectory:
    """Adds the policy ``IMPORTANCE`` to LMCache's table in this process; an earlier one is replaced.

    Args:
        source: the engine's, when LMCache runs in its scheduler's thread; else one that is safe to ask here.
        page_size: tokens per page of the server.
        chunk_tokens: LMCache's ``chunk_size``, a multiple of ``page_size``.

    Returns:
        The directory of chunks, for ``watch_tokens``; until it learns, the policy is LRU.

    Raises:
        LMCacheMissing: there is no LMCache, or another than the one this was written for.
        ValueError: chunks do not consist of whole pages.
    """
    policies = _import_policies()
    directory = ChunkDirectory(page_size, chunk_tokens)
    ranking = ChunkRanking(source, directory)
    policy_class = _policy_class(policies.BaseCachePolicy)
    policies.POLICY_MAPPING[POLICY_NAME] = lambda: policy_class(ranking)
    return directory


def _no_namespace(request_configs: Mapping[str, Any] | None) -> tuple[None, None]:
    return None, None


def watch_tokens(
    token_database: Any, directory: ChunkDirectory, namespace: Namespace = _no_namespace
) -> None:
    """Lets the directory learn from what the engine hashes: at each store, look-up and retrieval.

    Only this object is changed. Calls with hashes in place of tokens teach nothing.

    Args:
        token_database: ``engine.token_database``, of LMCache's chunked kind.
        directory: of ``register``.
        namespace: where requests have salts or adapters. LMCache's own hash knows neither, so chunks that two
            namespaces share count as those of the one that hashed them first.
    """
    process = token_database.process_tokens

    @wraps(process)
    def learning(tokens: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if tokens is not None:
            plain = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
            names = [name for _, _, name in process(tokens=plain, make_key=False)]
            extra_key, cache_salt = namespace(kwargs.get("request_configs"))
            directory.learn(names, plain, extra_key=extra_key, cache_salt=cache_salt)
        yield from process(tokens, *args, **kwargs)

    token_database.process_tokens = learning


def _import_policies() -> ModuleType:
    try:
        policies = import_module(_POLICIES)
    except ImportError as error:
        raise LMCacheMissing(f"cannot import {_POLICIES} ({error}): pip install lmcache") from error
    for name in ("BaseCachePolicy", "POLICY_MAPPING", "get_cache_policy"):
        if not hasattr(policies, name):
            raise LMCacheMissing(f"{_POLICIES} has no {name}: install lmcache==0.5.6")
    return policies


def _policy_class(base: Any) -> Any:
    class ImportanceCachePolicy(base):  # type: ignore[misc]
        """Least recently used first, except for what many queries looked at.

        LMCache calls it under the backend's own lock.
        """

        def __init__(self, ranking: ChunkRanking) -> None:
            self._ranking = ranking

        def init_mutable_mapping(self) -> OrderedDict[Any, Any]:
            return OrderedDict()

        def update_on_hit(self, key: Any, cache_dict: OrderedDict[Any, Any]) -> None:
            cache_dict.move_to_end(key)
            self._ranking.used(_name(key))

        def update_on_put(self, key: Any) -> None:
            self._ranking.used(_name(key))

        def update_on_force_evict(self, key: Any) -> None:
            """Nothing is kept by key."""

        def get_evict_candidates(
            self, cache_dict: OrderedDict[Any, Any], num_candidates: int = 1
        ) -> list[Any]:
            evictable = (key for key, chunk in cache_dict.items() if chunk.can_evict)
            oldest = list(islice(evictable, max(WINDOW, num_candidates)))
            victims = self._ranking.victims([_name(key) for key in oldest], num_candidates)
            return [oldest[position] for position in victims]

    return ImportanceCachePolicy


def _name(key: Any) -> int:
    """The hash of a chunk's tokens; all layers and ranks of a chunk share it."""
    name: int = key.chunk_hash
    return name
