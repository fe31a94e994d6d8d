"""From a name or a file to a model's shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from sgl_importance.json_text import BadJson, read_json
from sgl_importance_lab.kv_size.cache_dtype import DTYPES
from sgl_importance_lab.kv_size.context_length import context_length
from sgl_importance_lab.kv_size.families import family_of
from sgl_importance_lab.kv_size.fields import Fields, SizeError
from sgl_importance_lab.kv_size.model_shape import ModelShape

_BUNDLED = files("sgl_importance_lab.kv_size") / "bundled"
_MOST_BYTES = 8 << 20
_OF_WEIGHTS_ALONE = ("fp8", "mxfp4", "gptq", "awq", "compressed-tensors", "bitsandbytes")
"""Methods that say nothing of the cache in sglang, but for the two keys that are looked for beside them."""
_OTHER_NAMES = {"half": "float16", "float": "float32"}
"""Of torch's dtypes, which transformers reads too."""
_FP8 = "fp8_e4m3"
"""What sglang makes of ModelOpt's ``kv_cache_quant_algo`` FP8."""
_QUANTIZED_APART = "hf_quant_config.json"
"""Where ModelOpt writes how a checkpoint, and perhaps its cache, is quantized; sglang reads it."""


@dataclass(frozen=True, slots=True)
class BundledShape:
    """A well-known model's config, cut down to what decides the size of its cache.

    Attributes:
        name: to ask for it by.
        source: where its numbers were published.
        config: as in its config.json.
    """

    name: str
    source: str
    config: dict[str, Any]


def bundled_shapes() -> list[BundledShape]:
    """All that come with the package, by name."""
    return [_bundled(name) for name in bundled_names()]


def bundled_names() -> list[str]:
    return sorted(
        entry.name.removesuffix(".json") for entry in _BUNDLED.iterdir() if entry.name.endswith(".json")
    )


def _bundled(name: str) -> BundledShape:
    document = json.loads((_BUNDLED / f"{name}.json").read_text(encoding="utf-8"))
    return BundledShape(name, document["source"], document["config"])


def load_shape(model_or_config: str) -> ModelShape:
    """The shape of a bundled model, of a config.json, or of the one in a folder.

    Raises:
        SizeError: there is no such thing, or its config does not say what is needed.
    """
    if model_or_config in bundled_names():
        return read_shape(_bundled(model_or_config).config)
    path = Path(model_or_config)
    if path.is_dir():
        path = path / "config.json"
    if not model_or_config or not path.is_file():
        raise SizeError(
            f"{model_or_config or 'the empty name'} is neither a config.json nor a folder with one; models "
            f"known by name are {', '.join(bundled_names())}"
        )
    if path.stat().st_size > _MOST_BYTES:
        raise SizeError(
            f"{path} has more than {_MOST_BYTES >> 20} MiB and is no config.json: name another file"
        )
    try:
        config = read_json(path.read_bytes())
    except BadJson as error:
        raise SizeError(f"{path} is no JSON ({error}): name a config.json") from error
    shape = read_shape(config)
    apart = path.with_name(_QUANTIZED_APART)
    return replace(shape, dtype=_dtype_apart(apart)) if apart.is_file() else shape


def _dtype_apart(path: Path) -> str | None:
    """What ModelOpt's own file says of the cache; None where it does not say."""
    try:
        document = read_json(path.read_bytes())
    except BadJson as error:
        raise SizeError(f"{path} is no JSON ({error}): correct it, or move it away") from error
    quantization = document.get("quantization") if isinstance(document, dict) else None
    if not isinstance(quantization, dict):
        return None
    return _FP8 if _says_fp8(Fields(quantization)) else None


def read_shape(config: Any) -> ModelShape:
    """The shape that a config means to sglang 0.5.21.

    Raises:
        SizeError: it is not one that can be sized, or it lacks something.
    """
    if not isinstance(config, Mapping):
        raise SizeError("the config is no JSON object: name a config.json")
    outer = Fields(config)
    model_type = outer.word("model_type")
    family = family_of(model_type)
    # A class writes none where nobody has loaded weights with it; the type has one that sglang serves.
    if "architectures" in outer and len(outer.words("architectures", [family.architecture])) != 1:
        raise SizeError(f"architectures must name {family.architecture}, and nothing else")
    if outer.flag("is_hybrid_swa"):
        raise SizeError("is_hybrid_swa makes sglang build pools that this type has no size for: remove it")
    inner = family.text_part(outer)
    layers, caches, queries = family.read(inner)
    return ModelShape(
        model_type=model_type,
        num_layers=layers,
        caches=tuple(caches),
        queries=queries,
        context=context_length(inner, model_type),
        dtype=_dtype_of(outer, inner),
    )


def _dtype_of(outer: Fields, inner: Fields) -> str | None:
    """What the cache takes over (sglang's ``configure_kv_cache_dtype``); None where it does not say."""
    for fields in (outer, inner):
        if "quantization_config" not in fields:
            continue
        quantization = fields.inner("quantization_config")
        if _is_modelopt(quantization) and _says_fp8(quantization):
            return _FP8
        if not _leaves_the_cache(quantization):
            return None
    for fields in (outer, inner):
        for name in ("dtype", "torch_dtype"):
            if name not in fields:
                continue
            word = fields.word(name).removeprefix("torch.")
            word = _OTHER_NAMES.get(word, word)
            if word != "float32":
                return word if word in DTYPES else None
    # sglang serves float32 checkpoints, and such as do not say, in 16 bits.
    return "bfloat16" if outer.word("model_type").startswith("gemma") else "float16"


def _is_modelopt(quantization: Fields) -> bool:
    name = "quant_method"
    return name in quantization and quantization.word(name).startswith("modelopt")


def _says_fp8(quantization: Fields) -> bool:
    name = "kv_cache_quant_algo"
    return name in quantization and quantization.word(name).upper() == "FP8"


def _leaves_the_cache(quantization: Fields) -> bool:
    """Whether weights alone are quantized, so that the cache has the dtype of activations."""
    if "kv_cache_quant_algo" in quantization or "kv_cache_scheme" in quantization:
        return False
    return "quant_method" in quantization and quantization.word("quant_method") in _OF_WEIGHTS_ALONE
