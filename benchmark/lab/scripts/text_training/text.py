"""Python's own standard library as text: every machine has it, and nobody wrote it for a cache."""

from __future__ import annotations

import random
import sysconfig
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from sgl_importance_lab.probe.word_tokenizer import SPECIAL_TOKENS

FIRST_BYTE = len(SPECIAL_TOKENS)
"""Token id of byte 0, as in the retrieval model's vocabulary: its rows for bytes can be taken over."""
VOCABULARY = FIRST_BYTE + 256
HELD_OUT = 10
"""One file in so many is never trained on."""


@dataclass(frozen=True)
class Text:
    """Source files, in the order of their paths.

    Attributes:
        folder: whose ``*.py`` files are read, in all folders below but those of installed packages.
    """

    folder: Path

    @classmethod
    def of_this_python(cls) -> Text:
        return cls(Path(sysconfig.get_path("stdlib")))

    @cached_property
    def _files(self) -> list[tuple[str, bytes]]:
        found = {
            path.relative_to(self.folder).as_posix(): path
            for path in self.folder.rglob("*.py")
            if not {"site-packages", "dist-packages"} & set(path.parts)
        }
        return [(name, found[name].read_bytes()) for name in sorted(found)]

    @cached_property
    def training(self) -> bytes:
        """The files that are trained on, neighbours of a package side by side."""
        return b"".join(content for name, content in self._files if not _is_held_out(name))

    @cached_property
    def digest(self) -> str:
        """Of the training text: Python's releases differ."""
        return f"{zlib.crc32(self.training):08x}, {len(self.training):,} bytes"

    def held_out(self, length: int, count: int) -> list[list[int]]:
        """The last ``length`` bytes of each of ``count`` held-out files, as token ids; none shorter.

        Raises:
            ValueError: there are fewer such files.
        """
        long_enough = [
            content for name, content in self._files if _is_held_out(name) and len(content) >= length
        ]
        if len(long_enough) < count:
            raise ValueError(f"{len(long_enough)} held-out files have {length} bytes, not {count}")
        chosen = random.Random(0).sample(long_enough, count)
        return [token_ids(content[-length:]) for content in chosen]

    def batch(self, rng: random.Random, sequences: int, length: int) -> Tensor:
        """Windows of the training text at random places; int64 [sequences, length]."""
        starts = [rng.randrange(len(self.training) - length) for _ in range(sequences)]
        return torch.tensor([token_ids(self.training[start : start + length]) for start in starts])


def token_ids(text: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in text]


def _is_held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % HELD_OUT == 0
