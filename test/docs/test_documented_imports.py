"""Whatever a page shows to be imported from us can be imported."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from scripts.rendering.pages import committed_pages

ROOT = Path(__file__).parents[2]
PAGES = committed_pages()
OURS = ("sgl_importance", "sgl_importance_kernels", "sgl_importance_lab", "sglang_importance")


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in OURS


def imported_in_examples(page: str) -> set[tuple[str, str]]:
    """Modules and names that a page's Python blocks import; the name is empty for a whole module."""
    found = set()
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and is_ours(node.module):
                found |= {(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names if is_ours(alias.name)}
    return found


def named_factories(page: str) -> set[tuple[str, str]]:
    """``module:name``, as commands take it."""
    named: list[tuple[str, str]] = re.findall(r"\b(\w+(?:\.\w+)+):(\w+)", page)
    return {(module, name) for module, name in named if is_ours(module)}


def rendered_objects(page: str) -> set[str]:
    """What mkdocstrings makes a page of."""
    return set(re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE))


def imported(path: str) -> object:
    """The module of that name, or the attribute of one."""
    try:
        return import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(import_module(module), name)


SHOWN = sorted({each for page in PAGES for each in imported_in_examples(page.read_text())})
NAMED = sorted({each for page in PAGES for each in named_factories(page.read_text())})
RENDERED = sorted({each for page in PAGES for each in rendered_objects(page.read_text())})


@pytest.mark.parametrize(("module", "name"), [*SHOWN, *NAMED])
def test_what_a_page_shows_can_be_imported(module: str, name: str) -> None:
    found = import_module(module)
    assert not name or hasattr(found, name)


@pytest.mark.parametrize("path", RENDERED)
def test_what_the_reference_is_made_of_can_be_imported(path: str) -> None:
    assert getattr(imported(path), "__doc__", None), f"the reference would say nothing of {path}"


def test_they_are_found() -> None:
    assert ("sgl_importance.interface", "BlockImportance") in SHOWN
    assert ("sglang_importance.engine", "importance_engine") in SHOWN
    assert ("sgl_importance_lab.conformance.producers", "reference") in NAMED
    assert "sgl_importance.interface" in RENDERED
    assert "sgl_importance_lab.policies.lru.LruPolicy" in RENDERED
