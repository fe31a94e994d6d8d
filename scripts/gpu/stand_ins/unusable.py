"""Names that can be imported from a package that is not here, and say what they are when they are called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn


def unusable(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not in the stand-ins of scripts/gpu")

    return call


class Submodules(MetaPathFinder, Loader):
    """Finds any submodule of a package that has no file.

    Args:
        package: its name.
        missing: a submodule that stays missing.
    """

    def __init__(self, package: str, missing: str | None = None) -> None:
        self._package, self._missing = package, f"{package}.{missing}"

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if not fullname.startswith(f"{self._package}.") or fullname == self._missing:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = unusable

    def install(self) -> None:
        sys.meta_path.append(self)  # behind those that find files
