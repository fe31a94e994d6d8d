"""What transformers' configuration classes take for a value that a nested config leaves out.

transformers writes a nested config (``text_config``) without the values that its class has anyway: as
published, Gemma 3's says no ``head_dim``, and LLaVA's no number of layers. The outermost config has all of
its values, so one that is missing there is a mistake, and asked for.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


def class_defaults(model_type: str) -> dict[str, Any]:
    """Values that no other value of the config decides, by name; ``model_type`` must be one of the file."""
    return _classes()[model_type]


@cache
def _classes() -> dict[str, dict[str, Any]]:
    text = (files("sgl_importance_lab.kv_size") / "class_defaults.json").read_text(encoding="utf-8")
    classes: dict[str, dict[str, Any]] = json.loads(text)["classes"]
    return classes
