"""Tokenizers rebuilt from a GGUF file cut text as those cut it that the file's pieces come from."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from gguf import GGUFWriter, TokenType
from hypothesis import example, given, settings
from hypothesis import strategies as st
from real_models.byte_level_bpe import byte_level_bpe
from real_models.gguf_file import GgufFile
from real_models.sentencepiece_bpe import merges_of, sentencepiece_bpe
from tokenizers import Tokenizer

from support.gguf_files import add_sentencepiece, write_llama

TEXT = Path(__file__).parents[2] / "README.md"
LETTERS = "ab the\n\t '12éß漢🤽<>[]▁"


def kind_of(model: Any, id: int, whole: set[str]) -> TokenType:
    if model.is_byte(id):
        return TokenType.BYTE
    if model.is_control(id) or model.is_unknown(id):
        return TokenType.CONTROL
    return TokenType.USER_DEFINED if model.id_to_piece(id) in whole else TokenType.NORMAL


@pytest.fixture(scope="module")
def sentence_pieces() -> Any:
    """A tokenizer of Gemma's kind, trained on this project's README."""
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.read_text().splitlines()),
        model_writer=trained,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        user_defined_symbols=["\n", "\n\n", "▁▁", "▁▁▁", "<div>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())


@pytest.fixture(scope="module")
def rebuilt(sentence_pieces: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    ids = range(sentence_pieces.get_piece_size())
    whole = {"\n", "\n\n", "▁▁", "▁▁▁", "<div>"}
    kinds = [kind_of(sentence_pieces, id, whole) for id in ids]
    pieces = [
        # As llama.cpp's converter writes them.
        sentence_pieces.id_to_piece(id).replace("▁", " ")
        if kind is TokenType.USER_DEFINED
        else sentence_pieces.id_to_piece(id)
        for id, kind in zip(ids, kinds, strict=True)
    ]
    path = tmp_path_factory.mktemp("gguf") / "tokenizer.gguf"
    writer = GGUFWriter(path, "gemma3")
    add_sentencepiece(writer, pieces, [sentence_pieces.get_score(id) for id in ids], kinds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return sentencepiece_bpe(GgufFile(path))


@settings(max_examples=300)
@given(text=st.text(LETTERS, max_size=60) | st.text(max_size=40))
@example(text=TEXT.read_text())
def test_cut_as_sentencepiece_cuts(sentence_pieces: Any, rebuilt: Tokenizer, text: str) -> None:
    ids = rebuilt.encode(text, add_special_tokens=False).ids
    assert ids == sentence_pieces.encode(text)
    assert rebuilt.decode(ids) == text.replace("▁", " ")


def test_a_text_begins_with_the_beginning(rebuilt: Tokenizer) -> None:
    assert rebuilt.encode("server").tokens[0] == "<s>"


def test_a_piece_is_made_of_pieces_only() -> None:
    scores = {"a": -3.0, "b": -4.0, "ab": -1.0, "aba": -2.0, "xy": 0.0}
    assert merges_of(scores) == [("a", "b"), ("ab", "a")]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (" the 12", ["Ġthe", "Ġ", "1", "2"]),  # a number digit by digit, though there is a merge
        ("the<|im_end|>", ["t", "he", "<|im_end|>"]),
        ("\n\té", ["Ċ", "ĉ", "Ã", "©"]),
    ],
)
def test_cut_as_smollm_does(tmp_path: Path, text: str, tokens: list[str]) -> None:
    tokenizer = byte_level_bpe(GgufFile(write_llama(tmp_path / "tiny.gguf")))
    encoded = tokenizer.encode(text)
    assert encoded.tokens == tokens
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
