"""Small GGUF files, as llama.cpp's converter would write them, and what llama.cpp computes from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from torch import Tensor

LLAMA = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "head_count": 4,
    "head_count_kv": 2,
    "rope_freq_base": 10_000.0,
    "layer_norm_rms_eps": 1e-5,
}
BYTES = sorted({*range(33, 127), *range(161, 173), *range(174, 256)})
"""The bytes that GPT-2's tokenizer writes as themselves; the others follow at 256."""


def byte_pieces() -> list[str]:
    """One piece for each byte, as byte-level tokenizers write them."""
    others = [byte for byte in range(256) if byte not in BYTES]
    return [chr(byte) for byte in BYTES] + [chr(256 + at) for at in range(len(others))]


def write_llama(path: Path, *, seed: int = 0, eos: str = "<|im_end|>", pre: str = "smollm") -> Path:
    """A random Llama of two layers with SmolLM2's kind of tokenizer; matrices in Q4_1, embeddings in Q8_0."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = ["Ġ t", "h e", "Ġt he", "1 2"]
    pieces = [*control, *byte_pieces(), *(merge.replace(" ", "") for merge in merges)]
    writer = GGUFWriter(path, "llama")
    _add_sizes(writer, LLAMA)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(pieces)
    writer.add_token_types([TokenType.CONTROL if piece in control else TokenType.NORMAL for piece in pieces])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(pieces.index(eos))
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    random = np.random.default_rng(seed)
    width, hidden, heads, kv_heads = (
        LLAMA[name] for name in ("embedding_length", "feed_forward_length", "head_count", "head_count_kv")
    )
    head = width // heads

    def matrix(name: str, rows: int, columns: int, kind: GGMLQuantizationType) -> None:
        values = random.normal(0, 0.15, (rows, columns)).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(name, random.uniform(0.5, 1.5, width).astype(np.float32))

    matrix("token_embd.weight", len(pieces), width, GGMLQuantizationType.Q8_0)
    norm("output_norm.weight")
    for layer in range(LLAMA["block_count"]):
        norm(f"blk.{layer}.attn_norm.weight")
        norm(f"blk.{layer}.ffn_norm.weight")
        for part, rows, columns in (
            ("attn_q", heads * head, width),
            ("attn_k", kv_heads * head, width),
            ("attn_v", kv_heads * head, width),
            ("attn_output", width, heads * head),
            ("ffn_gate", hidden, width),
            ("ffn_up", hidden, width),
            ("ffn_down", width, hidden),
        ):
            matrix(f"blk.{layer}.{part}.weight", rows, columns, GGMLQuantizationType.Q4_1)
    return _finish(writer, path)


def write_gemma3(
    path: Path, model: Any, pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[TokenType]
) -> Path:
    """The weights of a ``Gemma3ForCausalLM``, under the names that the gguf package gives them."""
    config = model.config
    writer = GGUFWriter(path, "gemma3")
    _add_sizes(
        writer,
        {
            "block_count": config.num_hidden_layers,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "head_count": config.num_attention_heads,
            "head_count_kv": config.num_key_value_heads,
            "key_length": config.head_dim,
            "value_length": config.head_dim,
            "rope_freq_base": 1e6,
            "layer_norm_rms_eps": config.rms_norm_eps,
            "sliding_window": config.sliding_window,
        },
    )
    add_sentencepiece(writer, pieces, scores, kinds)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, values in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        ours = names.get_name(name, try_suffixes=(".weight",))
        # llama.cpp's norms multiply by what is stored, transformers' by one more.
        writer.add_tensor(ours, (values + 1 if name.endswith("norm.weight") else values).numpy())
    return _finish(writer, path)


def add_sentencepiece(
    writer: GGUFWriter, pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[TokenType]
) -> None:
    """A tokenizer whose first pieces are padding, end, beginning and the unknown one, as Gemma's are."""
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(pieces))
    writer.add_token_scores(list(scores))
    writer.add_token_types(list(kinds))
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def _add_sizes(writer: GGUFWriter, sizes: Mapping[str, Any]) -> None:
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)


def _finish(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_logits(weight: Callable[[str], Tensor], ids: Sequence[int]) -> Tensor:
    """Logits [tokens, vocabulary] in float32, from GGUF's tensors by name, in their own order of channels.

    Neighbours are turned together there (llama.cpp's ``LLAMA_ROPE_TYPE_NORM``).
    """
    heads, kv_heads = LLAMA["head_count"], LLAMA["head_count_kv"]
    tokens = len(ids)
    hidden = weight("token_embd.weight")[list(ids)]

    def normed(values: Tensor, name: str) -> Tensor:
        return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-5) * weight(name)

    def turned(values: Tensor) -> Tensor:
        size = values.shape[-1]
        speeds = LLAMA["rope_freq_base"] ** (-torch.arange(0, size, 2) / size)
        turns = torch.polar(torch.ones(tokens, size // 2), torch.arange(tokens)[:, None] * speeds)
        pairs = torch.view_as_complex(values.reshape(tokens, -1, size // 2, 2).contiguous())
        return torch.view_as_real(pairs * turns[:, None]).reshape(values.shape)

    for layer in range(LLAMA["block_count"]):
        own = f"blk.{layer}."
        inputs = normed(hidden, own + "attn_norm.weight")
        query, key, value = (
            (inputs @ weight(f"{own}attn_{part}.weight").T).view(tokens, count, -1)
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        key, value = (each.repeat_interleave(heads // kv_heads, 1) for each in (turned(key), value))
        logits = torch.einsum("qhd,khd->hqk", turned(query), key) / key.shape[-1] ** 0.5
        shares = logits.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", shares, value).reshape(tokens, -1)
        hidden = hidden + mixed @ weight(own + "attn_output.weight").T
        inputs = normed(hidden, own + "ffn_norm.weight")
        gate = torch.nn.functional.silu(inputs @ weight(own + "ffn_gate.weight").T)
        hidden = (
            hidden + (gate * (inputs @ weight(own + "ffn_up.weight").T)) @ weight(own + "ffn_down.weight").T
        )
    return normed(hidden, "output_norm.weight") @ weight("token_embd.weight").T
