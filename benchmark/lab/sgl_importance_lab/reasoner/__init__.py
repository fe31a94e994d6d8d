"""The embedded reasoning model: a small Llama whose long thoughts are right only if it looks back."""

from __future__ import annotations

from pathlib import Path


def reasoner_path() -> Path:
    """The directory of the committed checkpoint, in the layout of a Hugging Face model.

    Raises FileNotFoundError, naming the cure, when the weights are not there.
    """
    return _checkpoint("checkpoint", "")


def control_path() -> Path:
    """As `reasoner_path`, of the same model trained to answer without thinking."""
    return _checkpoint("control", " --no-thinking")


def _checkpoint(folder: str, option: str) -> Path:
    path = Path(__file__).parent / folder
    if not (path / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"no checkpoint in {path}: reinstall sgl-importance-lab, or run "
            f"benchmark/lab/scripts/train_reasoner.py --out {path}{option}"
        )
    return path
