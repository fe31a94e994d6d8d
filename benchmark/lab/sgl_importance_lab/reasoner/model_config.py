"""The reasoner's shape: the retrieval model's, with its own vocabulary."""

from __future__ import annotations

from sgl_importance_lab.probe.model_config import ModelConfig
from sgl_importance_lab.reasoner.tokenizer import reasoner_tokenizer


def reasoner_config() -> ModelConfig:
    """The shape of both checkpoints, the one that thinks and its control."""
    return ModelConfig(vocabulary=reasoner_tokenizer().size)
