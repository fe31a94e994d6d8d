"""What runs by night alone follows moves of what it imports, and knows what cannot be imported everywhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("sgl_importance", "sglang_importance", "sgl_importance_kernels", "sgl_importance_lab", "benchmark")
PLACES = ("python", "sgl_importance", "kernels", "benchmark", "scripts", "test")


@cache
def source(module: str) -> str | None:
    """Of a module or package; None where there is none."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        return None
    if spec is None:
        return None
    return Path(spec.origin).read_text() if spec.origin else ""  # a folder without __init__.py


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Modules of ours, and what is imported from each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (module := node.module) and module.split(".")[0] in OURS:
            yield from ((module, alias.name) for alias in node.names)


def is_there(module: str, name: str) -> bool:
    text = source(module)
    if text is None:
        return False
    return bool(re.search(rf"\b{name}\b", text)) or source(f"{module}.{name}") is not None


def test_everything_that_is_imported_from_us_is_there() -> None:
    files = [file for place in PLACES for file in (ROOT / place).rglob("*.py")]
    assert len(files) > 1_000
    missing = {
        f"{file.relative_to(ROOT)}: {module}.{name}"
        for file in files
        for module, name in imported(ast.parse(file.read_text()))
        if not is_there(module, name)
    }
    assert missing == set()


def test_what_is_not_there_is_found() -> None:
    assert is_there("sgl_importance.reuse.turns", "Turn")
    assert not is_there("sgl_importance.reuse.turns", "NoSuchName")
    assert not is_there("sgl_importance.no_such_room", "anything")


@pytest.mark.parametrize("package", ["sgl_importance", "sgl_importance_lab"])
def test_what_needs_torch_is_known_to_the_check_of_wheels(package: str) -> None:
    code = f"""
import check_install, importlib, sys
sys.modules.update(dict.fromkeys(check_install.ABSENT))
check_install.check_imports(importlib.import_module("{package}"))
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
