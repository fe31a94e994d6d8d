"""Requests with hints on a driven tree."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.kv_hints import KvHintsEnvelope, decode_kv_hints_envelope

from sgl_importance.placement.hints.hints import Hints

from support.drivers.tree_driver import Request, TreeDriver


def envelope(**hints: Any) -> KvHintsEnvelope:
    return decode_kv_hints_envelope(Hints.parse(hints).envelope())


def ask(driver: TreeDriver, tokens: list[int], **hints: Any) -> Request:
    """A request with hints, served to its end."""
    request = driver.admit(tokens)
    request.kv_hints = envelope(**hints)
    driver.prefill(request)
    driver.decode(request, [7])
    driver.finish(request)
    return request
