"""LoRA adapters, as the namespaces of pages name them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

_MARK = "+lora:"
_ENDS_WITH_ADAPTER = re.compile(re.escape(_MARK) + r"[0-9a-f]{32}\Z")


def adapters_by_id(manager: TokenizerManager) -> dict[str, str] | None:
    """Names of the loaded adapters by their ids; None on a server without LoRA."""
    if not manager.enable_lora:
        return None
    return {ref.lora_id: name for name, ref in manager.lora_registry.get_all_adapters().items()}


def check_extra_key(field: str, value: Any) -> None:
    """Looks at the key of a request, or at those of a batch.

    Raises:
        ValueError: it ends as only namespaces of adapters do.
    """
    for key in value if isinstance(value, list) else [value]:
        if isinstance(key, str) and _ENDS_WITH_ADAPTER.search(key):
            raise ValueError(f"{field}: {_MARK!r} and an id name an adapter's pages: end the key otherwise")


def name_adapters(obj: GenerateReqInput) -> None:
    """Marks the ``extra_key`` of requests for adapters, so that no other request's key spells their pages.

    sglang appends an adapter's id to a request's ``extra_key`` (``Req.__init__``), and ids of adapters that
    are given at launch follow from their names and paths. A key that ends with such an id would, without an
    adapter, leave in the adapter's namespace what the model computes without it. With our mark between key
    and id the two are told apart; a key that ends with mark and id is refused. Other keys stay as they are.

    Args:
        obj: on its way into the tokenizer manager, as a client has filled it: a single request or a batch.

    Raises:
        ValueError: a key ends as only namespaces of adapters do.
    """
    keys, adapters = obj.extra_key, obj.lora_path or obj.lora_id
    check_extra_key("extra_key", keys)
    if not adapters:
        return
    if not isinstance(adapters, list) and not isinstance(keys, list):
        obj.extra_key = (keys or "") + _MARK
        return
    size = len(adapters if isinstance(adapters, list) else keys or ())
    adapters_of = adapters if isinstance(adapters, list) else [adapters] * size
    keys_of = keys if isinstance(keys, list) else [keys or ""] * size
    if len(keys_of) == len(adapters_of):  # else sglang refuses it
        pairs = zip(keys_of, adapters_of, strict=True)
        obj.extra_key = [key + _MARK if adapter else key for key, adapter in pairs]


def split_namespace(
    extra_key: str | None, adapters: Mapping[str, str] | None
) -> tuple[str | None, str | None]:
    """What a request must carry for its pages to lie in a namespace: its ``extra_key`` and its adapter.

    Args:
        extra_key: of the pages.
        adapters: as ``adapters_by_id``.

    Raises:
        ValueError: the namespace is that of an adapter that is not loaded.
    """
    if extra_key is None or not _ENDS_WITH_ADAPTER.search(extra_key):
        return extra_key, None
    own, lora_id = extra_key[: -len(_MARK) - 32], extra_key[-32:]
    if lora_id not in (adapters or {}):
        raise ValueError(f"extra_key ends with the id of a LoRA adapter that is not loaded: {lora_id}")
    return own or None, (adapters or {})[lora_id]


def namespace_of(extra_key: str | None, adapter: str | None, manager: TokenizerManager) -> str | None:
    """The ``extra_key`` of the pages of requests with this key and adapter.

    Raises:
        HTTPException: 400, the adapter is not loaded.
    """
    if not adapter:
        return extra_key or None
    for lora_id, name in (adapters_by_id(manager) or {}).items():
        if name == adapter:
            return (extra_key or "") + _MARK + lora_id
    raise HTTPException(status_code=400, detail=f"lora_path: no adapter {adapter} is loaded")
