"""The benchmark on text: what is trained on and what is tried are apart, and the comparison's arithmetic."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

pytest.importorskip("torch")

import train_text_model
from text_training import text
from text_training.text import FIRST_BYTE, Text, token_ids

from benchmark.sparse.text import Predictions, compared
from sgl_importance_lab.probe.tokenizer import encode_text

ROWS, TOKENS = 3, 5

logits = arrays(np.float64, (ROWS, TOKENS), elements=st.floats(-20, 20))


def predictions(values: np.ndarray[Any, Any]) -> Predictions:
    normalised = values - np.log(np.exp(values).sum(-1, keepdims=True))
    return Predictions(normalised, np.zeros(ROWS, dtype=np.int64))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty files, each of its own bytes, and one that was installed."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_bytes(b"x" * 100)
    for number in range(40):
        (tmp_path / f"{number}.py").write_bytes(bytes([200 + number]) * (10 + number))
    return tmp_path


def test_what_is_tried_was_never_trained_on(folder: Path) -> None:
    source = Text(folder)
    tried = source.held_out(10, 2)
    assert len({tokens[0] for tokens in tried}) == 2
    for tokens in tried:
        assert len(tokens) == 10
        assert tokens[0] - FIRST_BYTE >= 200
        assert tokens[0] - FIRST_BYTE not in source.training
    assert b"x" not in source.training
    held_out = 40 - len(set(source.training))
    assert source.held_out(10, held_out)
    with pytest.raises(ValueError, match=f"{held_out} held-out files have 10 bytes, not {held_out + 1}"):
        source.held_out(10, held_out + 1)


def test_the_digest_is_that_of_the_text(folder: Path) -> None:
    before = Text(folder).digest
    assert Text(folder).digest == before
    trained = next(name for name in map(str, range(40)) if not text._is_held_out(f"{name}.py"))
    (folder / f"{trained}.py").write_bytes(b"changed")
    assert Text(folder).digest != before


def test_tokens_of_bytes_are_those_of_the_retrieval_model() -> None:
    """Its tokenizer writes what is no word of its vocabulary as bytes."""
    assert encode_text("\xe9") == token_ids("\xe9".encode())


@given(logits, logits)
def test_divergence_is_that_of_kullback_and_leibler(exact: Any, chosen: Any) -> None:
    one, other = predictions(exact), predictions(chosen)
    assert one.divergence_to(one) == 0
    assert one.agreement_with(one) == 1
    by_hand = [
        sum(
            math.exp(p) * (p - q)
            for p, q in zip(one.log_probabilities[row], other.log_probabilities[row], strict=True)
        )
        for row in range(ROWS)
    ]
    assert one.divergence_to(other) == pytest.approx(sum(by_hand) / ROWS, abs=1e-9)
    assert one.divergence_to(other) >= -1e-12
    assert one.loss == pytest.approx(-one.log_probabilities[:, 0].mean())


def test_what_a_longer_context_gains_is_beside_the_shortest() -> None:
    flat, sure = predictions(np.zeros((ROWS, TOKENS))), predictions(np.eye(ROWS, TOKENS) * [9, 0, 0, 0, 0])
    row = compared([(sure, flat), (sure, flat)], [math.log(TOKENS)] * 2)
    assert row["gain"]["value"] == pytest.approx(math.log(TOKENS) - sure.loss)
    assert row["gain"]["value"] > 0
    assert row["gain_chosen"]["value"] == pytest.approx(0)
    assert row["agreement"]["value"] == 1


def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    options: dict[str, Any] = {"smoke": True, "threads": 1}
    train_text_model.main(out=tmp_path / "whole", max_steps=3, **options)
    train_text_model.main(out=tmp_path / "parts", max_steps=1, **options)
    first = (tmp_path / "parts" / "model.safetensors").read_bytes()
    train_text_model.main(out=tmp_path / "parts", max_steps=2, **options)
    assert (tmp_path / "parts" / "model.safetensors").read_bytes() != first
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    with pytest.raises(train_text_model.typer.BadParameter, match="another seed or plan"):
        train_text_model.main(out=tmp_path / "parts", seed=1, max_steps=1, **options)


def test_training_lowers_the_loss(folder: Path, tmp_path: Path) -> None:
    run = train_text_model.Run(Text(folder), 0, 64, tmp_path / "state.pt")
    batch = Text(folder).batch(train_text_model.random.Random(0), 2, 32)
    before = train_text_model.loss_of(run.decoder, batch).item()
    run.train(600, 12)
    assert train_text_model.loss_of(run.decoder, batch).item() < 0.8 * before
