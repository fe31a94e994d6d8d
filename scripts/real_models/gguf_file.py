"""A GGUF file, read with the `gguf` package that sglang brings: metadata, and tensors as float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from real_models.trouble import ModelTrouble


class GgufFile:
    """``metadata[key]`` by the keys of the GGUF specification; tensors by their names there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = gguf.GGUFReader(path)
        self._fields = self._reader.fields
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def metadata(self, key: str) -> Any:
        """A number, text or list of these.

        Raises:
            ModelTrouble: the file has no such key.
        """
        if key not in self._fields:
            raise ModelTrouble(
                f"{self._path.name} has no {key}: another kind of model than this converter reads"
            )
        return self._fields[key].contents()

    def optional(self, key: str) -> Any:
        """As ``metadata``; None where the file has no such key."""
        return self._fields[key].contents() if key in self._fields else None

    @property
    def architecture(self) -> str:
        """As llama.cpp calls it, such as ``llama``."""
        return str(self.metadata("general.architecture"))

    def of_architecture(self, key: str) -> Any:
        """``metadata`` of a key below the architecture's name, such as ``block_count``."""
        return self.metadata(f"{self.architecture}.{key}")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A tensor, float32, rows first as PyTorch has it: [outputs, inputs] for a matrix."""
        found = self._tensors[name]
        values = gguf.quants.dequantize(found.data, found.tensor_type)
        # GGUF gives sizes from the innermost outwards.
        return np.array(values.reshape(found.shape[::-1].tolist()), dtype=np.float32)
