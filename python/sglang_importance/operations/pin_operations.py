"""The operations on pins: take one in, end one, list them."""

from __future__ import annotations

from array import array
from collections.abc import Generator

from sgl_importance.nodes.digests import iterate_chain, root_digest
from sgl_importance.placement.pins.pin import PIN_OCTAVES, Pin
from sgl_importance.placement.pins.pin_room import PinRefused
from sglang_importance.cache.importance_cache import ImportanceRadixCache
from sglang_importance.operations.job import Document, Job, NotFound, RequestError, Slices
from sglang_importance.placement.pinning import Pinning

SLICE_PAGES = 1024  # digests that take about a millisecond


def pin(cache: ImportanceRadixCache, arguments: Document) -> Job:
    """``pin_id``, ``tokens``, ``extra_key``, ``cache_salt`` and ``expires_at`` of a pin: takes it in."""
    pinning = _pinning(cache)
    return _pin(pinning, Pin(**{**arguments, "tokens": array("q", arguments["tokens"])}))


def _pin(pinning: Pinning, wanted: Pin) -> Generator[None, None, Document]:
    start = root_digest(wanted.extra_key, wanted.cache_salt)
    pages = iterate_chain(start, wanted.tokens, pinning.table.page_size)
    for count, digest in enumerate(pages, start=1):
        wanted.digests.append(digest)
        if count % SLICE_PAGES == 0:
            yield
    try:
        pinning.pin(wanted)
    except PinRefused as refused:
        raise RequestError(str(refused)) from None
    return {
        "pin_id": wanted.pin_id,
        "tokens": len(wanted.tokens),
        "granted_tokens": _granted(pinning, wanted),
    }


def let_time_pass(cache: ImportanceRadixCache, _: Document) -> Document:
    """What ``pins`` changes: pins whose time is over end."""
    _pinning(cache).let_time_pass()
    return {}


def unpin(cache: ImportanceRadixCache, arguments: Document) -> Document:
    """``pin_id`` of the pin to end."""
    name = arguments["pin_id"]
    try:
        _pinning(cache).unpin(name)
    except KeyError:
        raise NotFound(f"pin_id: there is no pin {name}: it was unpinned, has ended or never was") from None
    return {"pin_id": name}


def pins(cache: ImportanceRadixCache, arguments: Document) -> Job:
    """Every pin, oldest first, and the use of the budget; takes no arguments."""
    return _describe(_pinning(cache))


def _describe(pinning: Pinning) -> Generator[None, None, Document]:
    described = []
    pause = Slices(calls_per_look=1)  # a pin is looked for in the tree, which may take a while
    survivors = pinning.survivors()
    for held in pinning.current():
        described.append(
            {
                "pin_id": held.pin_id,
                "source": held.source.name.lower(),
                "cache_salt": held.cache_salt,
                "extra_key": held.extra_key,
                "tokens": len(held.tokens),
                "granted_tokens": _granted(pinning, held),
                "resident_tokens": pinning.resident_tokens(held),
                "strength": held.octaves / PIN_OCTAVES,
                "expires_in_seconds": _remaining(pinning, held),
                "survives_restart": held.pin_id in survivors,
            }
        )
        if pause.is_due():
            yield
    table = pinning.table
    budget = {
        tier.value: {"tokens": table.budget_tokens(tier), "granted_tokens": table.granted_tokens(tier)}
        for tier in table.tiers
    }
    return {"pins": described, "budget": budget}


def _granted(pinning: Pinning, held: Pin) -> dict[str, int]:
    return {tier.value: pages * pinning.table.page_size for tier, pages in held.granted.items()}


def _remaining(pinning: Pinning, held: Pin) -> float | None:
    return None if held.expires_at is None else max(0.0, held.expires_at - pinning.table.now)


def _pinning(cache: ImportanceRadixCache) -> Pinning:
    component = cache.importance
    policy = component.state.options.policy
    if policy != "importance":
        raise RequestError(
            f"pins move nothing under --kv-policy {policy}: start the server with --kv-policy importance"
        )
    if component.state.tree.has_paired_keys:
        raise RequestError("pins are not kept beside EAGLE: start the server without --speculative-algorithm")
    return component.pins
