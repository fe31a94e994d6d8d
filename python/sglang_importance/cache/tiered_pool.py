"""The pool behind a scheduler's cache, where its pages are tiered."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from sglang_importance.cache.importance_cache import ImportanceRadixCache

if TYPE_CHECKING:  # the pool brings numba, which the HTTP process would load for nothing
    from sglang_importance.sparse.pool import TieredKVPool


def tiered_pool(cache: ImportanceRadixCache) -> TieredKVPool | None:
    """The pool; None where it is another."""
    if not cache.importance.state.options.is_tiered:
        return None
    pool = cache.token_to_kv_pool_allocator.get_kvcache()
    return cast("TieredKVPool", pool)
