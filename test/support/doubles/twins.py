"""Broken twins: copies of a kernel module with one change, which the tests must tell from the original."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Mutation:
    """Replaces ``old``, which occurs exactly once in the module, by ``new``."""

    name: str
    old: str
    new: str

    def __str__(self) -> str:
        return self.name


def broken_twin(module: ModuleType, mutation: Mutation, folder: Path) -> ModuleType:
    """The module with the mutation, loaded from ``folder``: kernels are compiled from their source files."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(mutation.old) == 1, f"{mutation.name}: {source.count(mutation.old)} occurrences"
    path = folder / f"{module.__name__.rpartition('.')[2]}_{mutation.name}.py"
    path.write_text(source.replace(mutation.old, mutation.new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    twin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(twin)
    return twin
