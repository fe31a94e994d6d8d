"""Files of ``--kv-importance-config`` for servers of tests and benchmarks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from sgl_importance.options.importance_options import CONFIG_FLAG


def config_flags(**groups: Mapping[str, Any]) -> tuple[str, str]:
    """The flag with a file that chooses these options; the file lasts as long as this process.

    Args:
        **groups: keys with their values, by group: ``signal={"window": 2}``.
    """
    lines = []
    for group, values in groups.items():
        # TOML writes words, numbers and lists of them as JSON does.
        lines += [f"[{group}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    text = "\n".join(lines) + "\n"
    file = Path(_folder().name) / f"{sha256(text.encode()).hexdigest()[:16]}.toml"
    file.write_text(text)
    return CONFIG_FLAG, str(file)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kv-importance-config-")
