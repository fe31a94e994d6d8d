"""The training script: an interrupted run ends where an uninterrupted one does, and it learns."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from sgl_importance_lab.reasoner.tasks import make_task
from sgl_importance_lab.reasoner.tokenizer import reasoner_tokenizer

torch = pytest.importorskip("torch")


@pytest.fixture
def train_reasoner() -> ModuleType:
    import train_reasoner  # needs torch

    return train_reasoner


@pytest.mark.parametrize("thinking", [True, False])
def test_interrupted_run_ends_where_an_uninterrupted_one_does(
    train_reasoner: ModuleType, tmp_path: Path, thinking: bool
) -> None:
    options = {"smoke": True, "threads": 1, "thinking": thinking}
    train_reasoner.main(out=tmp_path / "whole", max_steps=3, **options)
    train_reasoner.main(out=tmp_path / "whole", finish_in=3, **options)
    train_reasoner.main(out=tmp_path / "parts", max_steps=1, **options)
    first = (tmp_path / "parts" / "model.safetensors").read_bytes()
    train_reasoner.main(out=tmp_path / "parts", max_steps=2, **options)
    train_reasoner.main(out=tmp_path / "parts", finish_in=3, max_steps=2, **options)
    train_reasoner.main(out=tmp_path / "parts", finish_in=3, **options)

    whole = (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert first != whole
    assert (tmp_path / "parts" / "model.safetensors").read_bytes() == whole
    records = [json.loads((tmp_path / run / "training.json").read_text()) for run in ("whole", "parts")]
    for record in records:
        record.pop("seconds")
    assert records[0] == records[1]
    assert records[0]["finished"]
    assert records[0]["steps"] == 6


def test_another_seed_does_not_take_up_a_run(train_reasoner: ModuleType, tmp_path: Path) -> None:
    train_reasoner.main(out=tmp_path / "run", smoke=True, threads=1, max_steps=1)
    with pytest.raises(train_reasoner.typer.BadParameter, match="another seed or plan"):
        train_reasoner.main(out=tmp_path / "run", smoke=True, threads=1, seed=1)


def test_training_steps_lower_the_loss_of_their_batch(train_reasoner: ModuleType) -> None:
    from decoder_training.decoder import build_decoder
    from reasoner_training.curriculum import Curriculum, smoke_plan
    from reasoner_training.evaluation import to_batch

    from sgl_importance_lab.probe.model_config import ModelConfig

    torch.set_num_threads(1)
    tiny = ModelConfig(reasoner_tokenizer().size, layers=1, width=64, heads=2, kv_heads=1, hidden=128)
    decoder = build_decoder(tiny, seed=0)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3)
    batch = to_batch(Curriculum(smoke_plan(), seed=0).batch()[2])
    losses = [float(train_reasoner.train_step(decoder, optimizer, batch)[0]) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_start_is_the_retrieval_model(train_reasoner: ModuleType) -> None:
    """A prompt of words that both models know has the hidden states that the retrieval model gives it."""
    from decoder_training.decoder import Decoder, build_decoder
    from safetensors.torch import load_file

    from sgl_importance.embedded_model import checkpoint_path
    from sgl_importance_lab.probe.model_config import probe_config
    from sgl_importance_lab.probe.tokenizer import token_ids
    from sgl_importance_lab.reasoner.model_config import reasoner_config
    from sgl_importance_lab.reasoner.vocabulary import NODES

    decoder = build_decoder(reasoner_config(), seed=0)
    train_reasoner.start_from_probe(decoder)
    probe = Decoder(probe_config())
    probe.load_state_dict(load_file(checkpoint_path() / "model.safetensors"))
    words = [f"{node} " for node in NODES[:50]]
    own = torch.tensor([[reasoner_tokenizer().ids[word] for word in words]])
    theirs = torch.tensor([[token_ids()[word] for word in words]])
    positions = torch.arange(len(words))[None]
    with torch.inference_mode():
        assert torch.equal(decoder(own, positions), probe(theirs, positions))


def test_a_window_hides_what_lies_behind_it_and_not_the_prompt() -> None:
    from reasoner_training.evaluation import window_mask
    from reasoner_training.training_data import reasoning_sequence

    sequences = [reasoning_sequence(make_task("search", length, 0), thinks=True) for length in (60, 120)]
    mask = window_mask(sequences, window=7)
    for row, sequence in enumerate(sequences):
        for query in (3, sequence.reply_start + 2, len(sequence.ids) - 1):
            seen = {key for key in range(mask.shape[-1]) if mask[row, 0, query, key]}
            prompt = set(range(min(query + 1, sequence.reply_start)))
            assert seen == prompt | set(range(max(0, query - 6), query + 1))


def test_a_window_as_long_as_the_sequence_changes_nothing() -> None:
    from decoder_training.decoder import build_decoder
    from reasoner_training.evaluation import to_batch, window_mask
    from reasoner_training.training_data import reasoning_sequence

    from sgl_importance_lab.reasoner.model_config import reasoner_config

    sequences = [reasoning_sequence(make_task("program", 60, 0), thinks=True)]
    batch = to_batch(sequences)
    decoder = build_decoder(reasoner_config(), seed=0)
    with torch.inference_mode():
        plain = decoder(batch.ids, batch.positions)
        longest = decoder(batch.ids, batch.positions, window_mask(sequences, batch.ids.shape[1]))
        short = decoder(batch.ids, batch.positions, window_mask(sequences, 8))
    torch.testing.assert_close(plain, longest)
    assert not torch.allclose(plain, short)
