"""A SentencePiece tokenizer of the kind BPE, from the pieces and scores that a GGUF file lists.

Such a file has no merges. SentencePiece joins, of all neighbouring pieces, those whose joint piece has the
best score, the leftmost where two are equal (bpe_model.cc): the order of merges sorted by what they make.
"""

from __future__ import annotations

from collections.abc import Sequence

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from real_models.gguf_file import GgufFile

SPACE = "▁"  # what SentencePiece writes for a space


def sentencepiece_bpe(file: GgufFile) -> Tokenizer:
    """The tokenizer of a file whose ``tokenizer.ggml.model`` is ``llama``."""
    kinds = [TokenType(kind) for kind in file.metadata("tokenizer.ggml.token_type")]
    pieces = [
        piece.replace(" ", SPACE) if kind is TokenType.USER_DEFINED else piece
        for piece, kind in zip(file.metadata("tokenizer.ggml.tokens"), kinds, strict=True)
    ]
    ids = {piece: id for id, piece in enumerate(pieces)}
    scores = {
        piece: score
        for piece, score, kind in zip(pieces, file.metadata("tokenizer.ggml.scores"), kinds, strict=True)
        if kind is TokenType.NORMAL
    }
    unknown = pieces[file.metadata("tokenizer.ggml.unknown_token_id")]
    model = BPE(ids, merges_of(scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaces = [normalizers.Replace(" ", SPACE)]
    if file.optional("tokenizer.ggml.add_space_prefix"):
        spaces.insert(0, normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    control = [AddedToken(p, special=True, normalized=False) for p in _of(TokenType.CONTROL, pieces, kinds)]
    tokenizer.add_special_tokens(control)
    # Whole wherever they stand, and the longest first, as SentencePiece has them.
    tokenizer.add_tokens([AddedToken(p, normalized=True) for p in _of(TokenType.USER_DEFINED, pieces, kinds)])
    if file.optional("tokenizer.ggml.add_bos_token"):
        begin = pieces[file.metadata("tokenizer.ggml.bos_token_id")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin}:0 $A:0",
            pair=f"{begin}:0 $A:0 {begin}:1 $B:1",
            special_tokens=[(begin, ids[begin])],
        )
    return tokenizer


def merges_of(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the best score of what is made first."""
    merges = []
    for piece in sorted(scores, key=scores.__getitem__, reverse=True):
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        merges += [(left, right) for left, right in halves if left in scores and right in scores]
    return merges


def _of(wanted: TokenType, pieces: Sequence[str], kinds: Sequence[TokenType]) -> list[str]:
    return [piece for piece, kind in zip(pieces, kinds, strict=True) if kind is wanted]
