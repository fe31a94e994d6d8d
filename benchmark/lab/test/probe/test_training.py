"""The training script: an interrupted run ends where an uninterrupted one does, and it learns."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def train_probe() -> ModuleType:
    import train_probe  # needs torch

    return train_probe


def test_interrupted_run_ends_where_an_uninterrupted_one_does(
    train_probe: ModuleType, tmp_path: Path
) -> None:
    train_probe.main(out=tmp_path / "whole", smoke=True, threads=1)
    train_probe.main(out=tmp_path / "parts", smoke=True, threads=1, max_steps=1)
    first = (tmp_path / "parts" / "model.safetensors").read_bytes()
    train_probe.main(out=tmp_path / "parts", smoke=True, threads=1, max_steps=2)
    train_probe.main(out=tmp_path / "parts", smoke=True, threads=1)

    whole = (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert first != whole
    assert (tmp_path / "parts" / "model.safetensors").read_bytes() == whole
    records = [json.loads((tmp_path / run / "training.json").read_text()) for run in ("whole", "parts")]
    for record in records:
        record.pop("seconds")
    assert records[0] == records[1]
    assert records[0]["finished"]


def test_another_seed_does_not_take_up_a_run(train_probe: ModuleType, tmp_path: Path) -> None:
    train_probe.main(out=tmp_path / "run", smoke=True, threads=1, max_steps=1)
    with pytest.raises(train_probe.typer.BadParameter, match="another seed or plan"):
        train_probe.main(out=tmp_path / "run", smoke=True, threads=1, seed=1)


def test_a_training_step_lowers_the_loss_of_its_batch(train_probe: ModuleType) -> None:
    from probe_training.curriculum import Curriculum, smoke_plan

    from sgl_importance_lab.probe.model_config import probe_config

    torch.set_num_threads(1)
    decoder = train_probe.build_decoder(probe_config(), seed=0)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3)
    _, sequences = Curriculum(smoke_plan(), seed=0).batch()
    accuracies = [train_probe.train_step(decoder, optimizer, sequences) for _ in range(60)]
    assert accuracies[0] < 0.2
    assert accuracies[-1] > 0.9
