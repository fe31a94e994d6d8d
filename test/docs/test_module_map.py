"""The module map of docs/architecture.md, and whatever else the pages name, against the tree."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
IMPORTED_AS = {"sgl_importance_kernels": "kernels", "sglang_importance": "python/sglang_importance"}
# Folders whose files we name by path. Runs of `{a,b}` and `*` stand for several.
NAMED_FILE = re.compile(
    r"\b(?:benchmark|docs|kernels|python|scripts|sgl_importance|test)/[\w{},*./-]*\.(?:cuh?|json|md|py|sh|txt)\b"
)


def mapped_folders() -> list[str]:
    page = (ROOT / "docs/architecture.md").read_text()
    found = re.search(r"<!-- map.*?-->\n(.*?)<!-- end map -->", page, re.DOTALL)
    assert found, "docs/architecture.md has no module map"
    return re.findall(r"^\| `([^`]+)/` \|", found[1], re.MULTILINE)


def packages() -> set[str]:
    """Folders below which Python is imported or run, as the tree has them."""
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {folder_of(name) for name in installed}
    for top in ("sgl_importance", "kernels", "python/sglang_importance", "benchmark", "scripts"):
        found |= {str(file.parent.relative_to(ROOT)) for file in (ROOT / top).rglob("*.py")}
    found |= {str(file.parent.relative_to(ROOT)) for file in (ROOT / "test/support").glob("**/__init__.py")}
    return found


def folder_of(package: str) -> str:
    top, dot, rest = package.partition(".")
    return IMPORTED_AS.get(top, top) + dot.replace(".", "/") + rest.replace(".", "/")


def test_every_package_is_on_the_map() -> None:
    assert packages() <= set(mapped_folders())


def test_the_map_names_nothing_twice_and_nothing_that_is_not_there() -> None:
    folders = mapped_folders()
    assert len(folders) == len(set(folders))
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []


def imports_of(folder: str) -> Iterator[str]:
    """Folders that the modules of a folder import from, be it for types only or within a function."""
    for file in (ROOT / folder).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                imported = folder_of(name)
                yield imported if (ROOT / imported).is_dir() else str(Path(imported).parent)


def test_the_map_goes_from_the_bottom_to_the_top() -> None:
    """No folder imports from one further down: the map shows the layers, and there is no circle."""
    folders = [name for name in mapped_folders() if name.startswith(("kernels", "sgl_importance", "python/"))]
    place = {folder: index for index, folder in enumerate(folders)}
    shared = {"sgl_importance"}  # modules of the core that belong to no folder, such as the options
    upward = {
        f"{folder} imports from {imported}"
        for folder in folders
        if folder not in shared
        for imported in imports_of(folder)
        if imported not in shared
        and not folder.startswith(f"{imported}/")  # a folder within another is a part of it
        and place.get(imported, -1) > place[folder]
    }
    assert upward == set()
    assert "sgl_importance/nodes" in set(imports_of("sgl_importance/ranking"))


def test_where_to_look_first_names_what_is_there() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    table = page.partition("## Where to look first")[2].partition("\n(Names")[0]
    names = [name for name in re.findall(r"`([\w/]+(?:\.py|/))`", table) if name != "cli.py"]
    assert len(names) > 20
    plugin = ROOT / "python/sglang_importance"
    assert [name for name in names if not ((ROOT / name).exists() or (plugin / name).exists())] == []


def test_every_installed_folder_is_a_package() -> None:
    """setuptools ships what pyproject lists: a package that is not listed works in a checkout only."""
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    modules = {
        str(file.parent.relative_to(ROOT))
        for top in ("sgl_importance", "kernels", "python/sglang_importance")
        for file in (ROOT / top).rglob("*.py")
    }
    assert modules == {folder_of(name) for name in installed}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    missing = [
        name
        for name in NAMED_FILE.findall(page.read_text())
        if not any(any(ROOT.glob(alternative)) for alternative in alternatives(name))
    ]
    assert missing == []


def alternatives(name: str) -> list[str]:
    found = re.fullmatch(r"(.*?)\{([^}]*)\}(.*)", name)
    return [found[1] + word + found[3] for word in found[2].split(",")] if found else [name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_a_page_names_in_short_exist(page: Path) -> None:
    """As `faults.py` or `tree/faults.py`: some file of ours ends so."""
    files = [f"/{file.relative_to(ROOT)}" for file in python_files()]
    short = re.findall(r"`([\w/]+\.py)`", page.read_text())
    assert [name for name in short if not any(file.endswith(f"/{name}") for file in files)] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_folders_that_a_page_names_exist(page: Path) -> None:
    tops = "benchmark|docs|kernels|monitoring|python|scripts|sgl_importance|test"
    named = re.findall(rf"`((?:{tops})/[\w/]*)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@cache
def python_files() -> list[Path]:
    folders = ("sgl_importance", "kernels", "python", "benchmark", "scripts", "test")
    return [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
