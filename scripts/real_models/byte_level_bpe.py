"""A byte-level BPE tokenizer (GPT-2's kind), from the pieces and merges that a GGUF file lists."""

from __future__ import annotations

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from real_models.gguf_file import GgufFile
from real_models.trouble import ModelTrouble

_PRE_TOKENIZERS = {
    # Digits stand alone: llama.cpp's LLAMA_VOCAB_PRE_TYPE_SMOLLM, SmolLM2's own tokenizer.json.
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


def byte_level_bpe(file: GgufFile) -> Tokenizer:
    """The tokenizer of a file whose ``tokenizer.ggml.model`` is ``gpt2``.

    Raises:
        ModelTrouble: the file wants its text split in a way that is not known here.
    """
    split = file.metadata("tokenizer.ggml.pre")
    if split not in _PRE_TOKENIZERS:
        raise ModelTrouble(
            f"tokenizer.ggml.pre is {split}: only {', '.join(_PRE_TOKENIZERS)} can be converted"
        )
    pieces: list[str] = file.metadata("tokenizer.ggml.tokens")
    kinds: list[int] = file.metadata("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in file.metadata("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE({piece: id for id, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    control = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in control])
    return tokenizer
