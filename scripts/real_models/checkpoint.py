"""A folder that sglang and transformers load, made of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from tokenizers import Tokenizer

from real_models.byte_level_bpe import byte_level_bpe
from real_models.gemma3 import gemma3_config, gemma3_tensors
from real_models.gguf_file import GgufFile
from real_models.llama import llama_config, llama_tensors
from real_models.sentencepiece_bpe import sentencepiece_bpe
from real_models.trouble import ModelTrouble


@dataclass(frozen=True)
class Architecture:
    """How one of GGUF's architectures becomes one of transformers'."""

    config: Callable[[GgufFile], dict[str, Any]]
    tensors: Callable[[GgufFile], Iterator[tuple[str, NDArray[np.float32]]]]


ARCHITECTURES = {
    "llama": Architecture(llama_config, llama_tensors),
    "gemma3": Architecture(gemma3_config, gemma3_tensors),
}
TOKENIZERS: dict[str, Callable[[GgufFile], Tokenizer]] = {"gpt2": byte_level_bpe, "llama": sentencepiece_bpe}
DTYPE = torch.bfloat16  # what these models were published in, before they were quantised


def write_checkpoint(file: GgufFile, folder: Path) -> None:
    """Writes weights (bfloat16), config, tokenizer and chat template of ``file`` into ``folder``.

    Raises:
        ModelTrouble: the file's architecture, or its kind of tokenizer, cannot be converted.
    """
    architecture = _known(ARCHITECTURES, "general.architecture", file)
    tokenizer = _known(TOKENIZERS, "tokenizer.ggml.model", file)(file)
    ids = _special_ids(file)
    config = {
        **architecture.config(file),
        **ids,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    _write_json(folder / "config.json", config)
    # Greedy for clients that set no temperature: what one asks again is answered again alike.
    _write_json(folder / "generation_config.json", {**ids, "do_sample": True, "top_k": 1})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(file, config["max_position_embeddings"]))
    progress = track(
        architecture.tensors(file),
        "converting",
        len(file.names()),
        console=Console(stderr=True),
        transient=True,
    )
    weights = {name: torch.from_numpy(values).to(DTYPE) for name, values in progress}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _known(table: dict[str, Any], key: str, file: GgufFile) -> Any:
    value = file.metadata(key)
    if value not in table:
        raise ModelTrouble(f"{key} is {value}: only {', '.join(table)} can be converted")
    return table[value]


def _special_ids(file: GgufFile) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {ours: int(file.metadata(f"tokenizer.ggml.{theirs}_token_id")) for ours, theirs in names.items()}


def _tokenizer_config(file: GgufFile, longest: int) -> dict[str, Any]:
    pieces = file.metadata("tokenizer.ggml.tokens")
    content: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(file.optional("tokenizer.ggml.add_bos_token")),
    }
    for name, id in _special_ids(file).items():
        content[name.removesuffix("_id")] = pieces[id]
    if template := file.optional("tokenizer.chat_template"):
        content["chat_template"] = template
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
