"""What keeps a model from being had, in one line that names the cure."""

from __future__ import annotations


class ModelTrouble(Exception):
    """Its message is one line for the user."""
