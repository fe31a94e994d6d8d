"""The operator's extra configuration of a storage backend, in all forms that sglang reads.

They are those of ``HybridCacheController.parse_storage_backend_extra_config`` in sglang 0.5.21.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec.toml
import msgspec.yaml

from sgl_importance.json_text import BadJson, decode_json

_DECODERS: dict[str, Callable[[Any], Any]] = {
    ".json": json.loads,
    ".toml": msgspec.toml.decode,
    ".yaml": msgspec.yaml.decode,
    ".yml": msgspec.yaml.decode,
}


def read_extra_config(text: str | None) -> dict[str, Any]:
    """The settings in JSON, or in a JSON, TOML or YAML file whose path follows ``@``; dates become text.

    Raises:
        BadJson: it cannot be read as what it is, or is no object.
        OSError: the file cannot be read.
    """
    if not text:
        return {}
    if not text.startswith("@"):
        config = decode_json(json.loads, text)
    else:
        path = Path(text[1:])
        decode = _DECODERS.get(path.suffix.lower())
        if decode is None:
            raise BadJson(f"{path} ends in none of {', '.join(_DECODERS)}")
        config = msgspec.to_builtins(decode_json(decode, path.read_bytes()), str_keys=True)
    if not isinstance(config, dict):
        raise BadJson(f"it is of type {type(config).__name__}")
    return config
