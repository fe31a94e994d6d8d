"""The embedded retrieval model: a small Llama whose answers are right only if attention finds the record."""

from __future__ import annotations

from pathlib import Path


def checkpoint_path() -> Path:
    """The directory of the committed checkpoint, in the layout of a Hugging Face model.

    Raises FileNotFoundError, naming the cure, when the weights are not there.
    """
    path = Path(__file__).parent / "checkpoint"
    if not (path / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"no probe checkpoint in {path}: reinstall sgl-importance, or run "
            "benchmark/lab/scripts/train_probe.py"
        )
    return path
