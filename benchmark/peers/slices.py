"""The first layers of a model, as a checkpoint: what is cached hangs on token ids, not on weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
LAYER = re.compile(r"\.layers\.(\d+)\.")


def first_layers(model: Path, layers: int, place: Path) -> Path:
    """A folder in ``place`` with so many layers of the model; made where it is missing."""
    folder = place / f"{model.name}-{layers}-layers"
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}, indent=1) + "\n")
    for name in COPIED:
        if (model / name).exists():
            shutil.copy(model / name, folder / name)
    kept = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118  # it is no mapping
                layer = LAYER.search(name)
                if layer is None or int(layer[1]) < layers:
                    kept[name] = weights.get_tensor(name)
    save_file(kept, folder / "unfinished", metadata={"format": "pt"})
    (folder / "unfinished").rename(folder / "model.safetensors")
    return folder
