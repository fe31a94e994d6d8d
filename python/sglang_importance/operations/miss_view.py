"""Why prompts were not found, as JSON."""

from __future__ import annotations

import time
from array import array
from collections.abc import Generator
from itertools import islice

from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_importance.misses.account import TOKENS_BEHIND, AccountedRequest, account_of
from sgl_importance.misses.miss_documents import operator_document
from sgl_importance.misses.path_memory import PathMemory
from sgl_importance.misses.path_tree import packed
from sgl_importance.options.importance_options import name_of
from sgl_importance.tiers import Tier
from sglang_importance.cache.importance_cache import ImportanceRadixCache
from sglang_importance.cache.misses import Misses
from sglang_importance.operations.job import Document, Job, NoLongerKnown, NotFound, RequestError, Slices
from sglang_importance.tree.annotated_tree import AnnotatedTree


def why(cache: ImportanceRadixCache, arguments: Document) -> Job:
    """The last requests, the newest first: ``limit`` of them, or the one whose id is ``rid``."""
    misses, memory = _kept(cache)
    return _why(cache, misses, memory, arguments["rid"], arguments["limit"])


def _why(
    cache: ImportanceRadixCache, misses: Misses, memory: PathMemory, rid: str | None, limit: int
) -> Generator[None, None, Document]:
    latest = list(reversed(misses.recent))
    if rid is None:
        documents, pause = [], Slices()
        for request in islice(latest, limit):
            documents.append(operator_document(request))
            if pause.is_due():
                yield
    else:
        found = next((request for request in latest if request.visit.rid == rid), None)
        if found is None:
            raise NotFound(f"request {rid} is none of the last {len(latest)}")
        documents = [operator_document(found, shown_tokens=TOKENS_BEHIND)]
    return {"requests": documents, **_memory(cache, memory)}


def why_prompt(cache: ImportanceRadixCache, arguments: Document) -> Document:
    """``tokens`` of a prompt under ``extra_key`` and ``cache_salt``: what a request would not find now.

    Storage is not asked.
    """
    misses, memory = _kept(cache)
    namespace = arguments["extra_key"], arguments["cache_salt"]
    tokens = array("q", arguments["tokens"])
    found = _found(cache.importance.state.tree, tokens, *namespace)
    prompt = packed(tokens, memory.ahead)
    account = account_of(memory, namespace, prompt, memory.path(namespace, prompt), found)
    asked = AccountedRequest(misses.now(None), namespace, account)
    return {
        "requests": [operator_document(asked, shown_tokens=TOKENS_BEHIND)],
        **_memory(cache, memory),
    }


def _found(
    tree: AnnotatedTree, tokens: array[int], extra_key: str | None, cache_salt: str | None
) -> dict[Tier, int]:
    """Tokens that a request would find in memory; the last one it computes always."""
    found = dict.fromkeys(Tier, 0)
    key, _ = RadixKey(tokens[:-1], extra_key, cache_salt=cache_salt).maybe_to_bigram_view(
        tree.has_paired_keys
    )
    for node, matched in tree.matching(key.page_aligned(tree.page_size)):
        found[Tier.HOST if node.evicted else Tier.DEVICE] += matched
    return found


def _kept(cache: ImportanceRadixCache) -> tuple[Misses, PathMemory]:
    misses = cache.importance.misses
    if misses is None:
        raise RequestError(f"no account is kept: {name_of('misses.memory')} is 0")
    misses.settle()
    if misses.memory is None:
        raise NoLongerKnown("a fault has ended the account of misses: look into the server's log")
    return misses, misses.memory


def _memory(cache: ImportanceRadixCache, memory: PathMemory) -> Document:
    return {
        "page_size": memory.page_size,
        "remembered_pages": len(memory),
        "forgot_at": memory.forgot_at,
        "clock": cache.importance.state.policy.clock,
        "now": time.time(),
    }
