"""The first layers of a model, as a checkpoint: what is cached hangs on token ids, not on weights.

Of the heads of a layer only the first group is kept, which reads one head of KV: sglang's ``torch_native``
computes attention for every token of a sequence in each step, which is most of the time of long prompts.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
LAYER = re.compile(r"\.layers\.(\d+)\.")
HEADS = re.compile(r"\.self_attn\.(q|k|v|o)_proj\.weight$")


def first_layers(model: Path, layers: int, place: Path) -> Path:
    """A folder in ``place`` with so many layers of a Llama; made where it is missing."""
    folder = place / f"{model.name}-{layers}-layers-1-group"
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    queries = config["num_attention_heads"] // config["num_key_value_heads"]
    sliced = {"num_hidden_layers": layers, "num_key_value_heads": 1}
    sliced |= {"num_attention_heads": queries, "head_dim": head}
    (folder / "config.json").write_text(json.dumps({**config, **sliced}, indent=1) + "\n")
    for name in COPIED:
        if (model / name).exists():
            shutil.copy(model / name, folder / name)
    kept = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118  # it is no mapping
                layer = LAYER.search(name)
                if layer is None or int(layer[1]) < layers:
                    kept[name] = first_heads(name, weights.get_tensor(name), queries * head, head)
    save_file(kept, folder / "unfinished", metadata={"format": "pt"})
    (folder / "unfinished").rename(folder / "model.safetensors")
    return folder


def first_heads(name: str, weight: Tensor, queries: int, keys: int) -> Tensor:
    """A weight's part for the first group of heads.

    Args:
        queries: width of what the group's heads ask.
        keys: width of the head that they read.
    """
    match HEADS.search(name):
        case None:
            return weight
        case found if found[1] == "o":
            return weight[:, :queries].contiguous()
        case found:
            return weight[: queries if found[1] == "q" else keys].contiguous()
