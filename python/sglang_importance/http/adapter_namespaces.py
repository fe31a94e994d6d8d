"""LoRA adapters, as the namespaces of pages name them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sglang.srt.managers.tokenizer_manager import TokenizerManager

_ENDS_WITH_ID = re.compile("[0-9a-f]{32}$")


def adapters_by_id(manager: TokenizerManager) -> dict[str, str] | None:
    """Names of the loaded adapters by their ids; None on a server without LoRA."""
    if not manager.enable_lora:
        return None
    return {ref.lora_id: name for name, ref in manager.lora_registry.get_all_adapters().items()}


def split_namespace(
    extra_key: str | None, adapters: Mapping[str, str] | None
) -> tuple[str | None, str | None]:
    """What a request must carry for its pages to lie in a namespace: its ``extra_key`` and its adapter.

    sglang appends an adapter's id to a request's ``extra_key``. With the whole as its ``extra_key`` a request
    would leave there what the model computes without the adapter.

    Args:
        extra_key: of the pages.
        adapters: as ``adapters_by_id``.

    Raises:
        ValueError: the namespace may be that of an adapter that is not loaded.
    """
    if extra_key is None or adapters is None or not _ENDS_WITH_ID.search(extra_key):
        return extra_key, None
    own, lora_id = extra_key[:-32], extra_key[-32:]
    if lora_id not in adapters:
        raise ValueError(f"extra_key ends with the id of a LoRA adapter that is not loaded: {lora_id}")
    return own or None, adapters[lora_id]
