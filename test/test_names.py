"""Names in what ships: one meaning each, and one base for what we raise on purpose."""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHIPPED = ("kernels", "sgl_importance", "python")


def classes_of(folders: tuple[str, ...]) -> dict[str, list[tuple[Path, set[str]]]]:
    """Where each class is defined, and the names of its bases."""
    found: dict[str, list[tuple[Path, set[str]]]] = defaultdict(list)
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
                    found[node.name].append((path.relative_to(ROOT), bases))
    return found


@pytest.fixture(scope="module")
def shipped() -> dict[str, list[tuple[Path, set[str]]]]:
    return classes_of(SHIPPED)


def test_no_two_classes_share_a_name(shipped: dict[str, list[tuple[Path, set[str]]]]) -> None:
    shared = {name: [str(path) for path, _ in places] for name, places in shipped.items() if len(places) > 1}
    assert not shared


def test_what_we_raise_has_one_base(shipped: dict[str, list[tuple[Path, set[str]]]]) -> None:
    kinds = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
    builtin = {name for name, kind in kinds.items() if issubclass(kind, Exception)}
    strays = [
        f"{places[0][0]}: {name}"
        for name, places in shipped.items()
        if name != "ImportanceError"
        and not name.startswith("_")
        and any(bases & builtin and "ImportanceError" not in bases for _, bases in places)
    ]
    assert not strays
