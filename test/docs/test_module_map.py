"""The module map of docs/architecture.md, and whatever else the pages name, against the tree."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from scripts.rendering.pages import committed_pages

ROOT = Path(__file__).parents[2]
PAGES = committed_pages()
IMPORTED_AS = {
    "sgl_importance_kernels": "kernels",
    "sgl_importance_lab": "benchmark/lab/sgl_importance_lab",
    "sglang_importance": "python/sglang_importance",
}
PROJECTS = (ROOT / "pyproject.toml", ROOT / "benchmark/lab/pyproject.toml")
SHIPPED = ("sgl_importance", "kernels", "python/sglang_importance", "benchmark/lab/sgl_importance_lab")
"""Folders of the packages of both distributions."""
# Folders whose files we name by path. Runs of `{a,b}` and `*` stand for several.
BUILT = "docs/generated"  # by scripts/render_docs.py, and not committed
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
    found = installed_folders()
    for top in ("sgl_importance", "kernels", "python/sglang_importance", "benchmark", "scripts"):
        found |= {
            str(file.parent.relative_to(ROOT))
            for file in (ROOT / top).rglob("*.py")
            if file.relative_to(ROOT).parts[:3]
            not in (("benchmark", "lab", "test"), ("benchmark", "lab", "build"))
        }
    found |= {str(file.parent.relative_to(ROOT)) for file in (ROOT / "test/support").glob("**/__init__.py")}
    return found


def installed_folders() -> set[str]:
    """Of the packages that both distributions list."""
    return {
        folder_of(name)
        for project in PROJECTS
        for name in tomllib.loads(project.read_text())["tool"]["setuptools"]["packages"]
    }


def folder_of(package: str) -> str:
    top, dot, rest = package.partition(".")
    return IMPORTED_AS.get(top, top) + dot.replace(".", "/") + rest.replace(".", "/")


def test_every_package_is_on_the_map() -> None:
    assert packages() <= set(mapped_folders())


def test_the_map_names_nothing_twice_and_nothing_that_is_not_there() -> None:
    folders = mapped_folders()
    assert len(folders) == len(set(folders))
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []


def test_the_map_goes_from_the_bottom_to_the_top() -> None:
    """In the order of the layers that test/test_layers.py holds the imports to."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    folders = mapped_folders()
    for contract in linter["contracts"]:
        if not contract.get("exhaustive"):
            continue
        place = {
            f"{folder_of(contract['containers'][0])}/{name}": place
            for place, layer in enumerate(reversed(contract["layers"]))
            for name in layer.split(" | ")
        }
        mapped = [place[folder] for folder in folders if folder in place]
        assert len(mapped) >= 10
        assert mapped == sorted(mapped)


def test_where_to_look_first_names_what_is_there() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    table = page.partition("## Where to look first")[2].partition("\n(Names")[0]
    names = [name for name in re.findall(r"`([\w/]+(?:\.py|/))`", table) if name != "cli.py"]
    assert len(names) > 20
    plugin = ROOT / "python/sglang_importance"
    assert [name for name in names if not ((ROOT / name).exists() or (plugin / name).exists())] == []


def test_every_installed_folder_is_a_package() -> None:
    """setuptools ships what pyproject lists: a package that is not listed works in a checkout only."""
    modules = {str(file.parent.relative_to(ROOT)) for top in SHIPPED for file in (ROOT / top).rglob("*.py")}
    assert modules == installed_folders()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    missing = [
        name
        for name in NAMED_FILE.findall(page.read_text())
        if not name.startswith(BUILT)
        and not any(any(ROOT.glob(alternative)) for alternative in alternatives(name))
    ]
    assert missing == []


def alternatives(name: str) -> list[str]:
    found = re.fullmatch(r"(.*?)\{([^}]*)\}(.*)", name)
    return [found[1] + word + found[3] for word in found[2].split(",")] if found else [name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_that_a_page_names_in_short_exist(page: Path) -> None:
    """As `faults.py` or `tree/faults.py`: some file of ours ends so."""
    files = [f"/{file.relative_to(ROOT)}" for file in python_files()]
    short = re.findall(r"`([\w/]+\.py)`", page.read_text())
    assert [name for name in short if not any(file.endswith(f"/{name}") for file in files)] == []


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_folders_that_a_page_names_exist(page: Path) -> None:
    tops = "benchmark|docs|kernels|monitoring|python|scripts|sgl_importance|test"
    named = re.findall(rf"`((?:{tops})/[\w/]*)`", page.read_text())
    assert [name for name in named if not name.startswith(BUILT) and not (ROOT / name).exists()] == []


@cache
def python_files() -> list[Path]:
    folders = ("sgl_importance", "kernels", "python", "benchmark", "scripts", "test")
    return [file for folder in folders for file in (ROOT / folder).rglob("*.py")]


def test_the_name_of_a_file_says_which_file() -> None:
    """In core, plugin and laboratory, beside `__init__` and `cli`. Both models have the same parts."""
    files = [
        file
        for package in ("sgl_importance", "python/sglang_importance", "benchmark/lab/sgl_importance_lab")
        for file in (ROOT / package).rglob("*.py")
        if file.parent.name != "reasoner"
    ]
    names = Counter(file.name for file in files)
    assert names["__init__.py"] > 1
    assert {name for name, times in names.items() if times > 1} == {"__init__.py", "cli.py"}
