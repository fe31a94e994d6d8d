"""Files of a training run, each written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors.torch import save_file
from torch import nn


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Writes the state of a run, readable by ``torch.load`` with ``weights_only``."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load_state(path: Path, run: str) -> dict[str, Any] | None:
    """The state of a run, None where there is none yet.

    Raises:
        typer.BadParameter: it is that of another run.
    """
    if not path.is_file():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True)
    if state["run"] != run:
        raise typer.BadParameter(
            f"{path} belongs to another seed or plan: give the options that it was started with, or delete it"
        )
    return state


def write_weights(directory: Path, decoder: nn.Module) -> None:
    """Writes the decoder's parameters as model.safetensors into `directory`."""
    weights = {name: tensor.contiguous() for name, tensor in decoder.state_dict().items()}
    partial = directory / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    os.replace(partial, directory / "model.safetensors")
