"""scripts/release.py: what keeps a tree from being tagged, what the wheel holds, and that it works alone."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
VERSION = "1.2.3"
READY = (
    f"# Changelog\n\n## [Unreleased]\n\n## [{VERSION}] - 2026-11-21\n\n- First.\n\n## [1.2.2] - 2026-01-01\n"
)
PROJECT = f"""
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "sgl-importance"
version = "{VERSION}"
description = "A tree like ours, with one file in each package"
readme = "README.md"

[tool.setuptools]
include-package-data = false
packages = ["sgl_importance", "sglang_importance", "sgl_importance_kernels"]

[tool.setuptools.package-dir]
sgl_importance = "sgl_importance"
sglang_importance = "python/sglang_importance"
sgl_importance_kernels = "kernels"

[tool.setuptools.package-data]
sglang_importance = ["ui/*"]
"""
LABORATORY = f"""
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "sgl-importance-lab"
version = "{VERSION}"
description = "A laboratory like ours, with one file"
readme = "README.md"

[tool.setuptools]
packages = ["sgl_importance_lab"]

[tool.setuptools.package-dir]
sgl_importance_lab = "sgl_importance_lab"
"""
FILES = {
    "benchmark/lab/sgl_importance_lab/__init__.py": "",
    "benchmark/lab/README.md": "# A laboratory\n\nLike ours.\n",
    "benchmark/lab/pyproject.toml": LABORATORY,
    "sgl_importance/__init__.py": "",
    "sgl_importance/a.py": "a = 1\n",
    "python/sglang_importance/__init__.py": "",
    "python/sglang_importance/ui/index.html": "<!doctype html>\n",
    "kernels/__init__.py": "",
    "test/test_a.py": "a = 2\n",
    "README.md": "# A tree\n\nLike ours.\n",
    "CHANGELOG.md": READY,
    "pyproject.toml": PROJECT,
    ".gitignore": "*.egg-info/\ndist/\n",
}


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts/release.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A committed tree that may be tagged."""
    root = tmp_path / "tree"
    for name, text in FILES.items():
        write(root, name, text)
    git(root, "init", "--quiet")
    git(root, "config", "user.name", "A")
    git(root, "config", "user.email", "a@example.org")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "all")
    return root


# ---- what keeps a tree from being tagged ----


def test_a_tree_that_is_ready_has_no_problem(release: Any, tree: Path) -> None:
    assert release.problems(tree) == []


@pytest.mark.parametrize(
    ("changelog", "said"),
    [
        ("## [Unreleased]\n- New.\n", "has no section for 1.2.3 with a day (it has none yet)"),
        ("## [1.2.2] - 2026-01-01\n", "its newest is '## [1.2.2] - 2026-01-01'"),
        ("## [1.2.3]\n", "its newest is '## [1.2.3]'"),
        ("## [1.2.3] - soon\n", "its newest is '## [1.2.3] - soon'"),
        (
            "## [Unreleased]\n\n- New.\n\n## [1.2.3] - 2026-11-21\n",
            "move what stands under '## [Unreleased]'",
        ),
    ],
)
def test_a_changelog_of_another_version_is_a_problem(
    release: Any, tree: Path, changelog: str, said: str
) -> None:
    write(tree, "CHANGELOG.md", changelog)
    git(tree, "commit", "--all", "--quiet", "--message", "changelog")
    (problem,) = release.problems(tree)
    assert said in problem


def test_both_distributions_have_one_version(release: Any, tree: Path) -> None:
    write(tree, "benchmark/lab/pyproject.toml", LABORATORY.replace(VERSION, "1.2.2"))
    git(tree, "commit", "--all", "--quiet", "--message", "laboratory")
    (problem,) = release.problems(tree)
    assert problem.startswith("version '1.2.2' in benchmark/lab/pyproject.toml")


def test_versions_are_written_in_one_way(release: Any, tree: Path) -> None:
    write(tree, "pyproject.toml", PROJECT.replace(VERSION, "1.2"))
    assert any("write it as 1.2.3" in problem for problem in release.problems(tree))


def test_uncommitted_changes_and_a_used_tag_are_problems(release: Any, tree: Path) -> None:
    write(tree, "new.py", "")
    git(tree, "tag", f"v{VERSION}")
    changes, used = release.problems(tree)
    assert "1 uncommitted changes, such as '?? new.py'" in changes
    assert f"the tag v{VERSION} exists" in used


def test_a_tree_that_is_not_ready_is_neither_built_nor_tagged(release: Any, tree: Path) -> None:
    write(tree, "sgl_importance/a.py", "changed = 1\n")
    with pytest.raises(release.NotReady, match=r"^error: 1 uncommitted changes"):
        release.release(tree, tree / "dist", tag=True)
    assert git(tree, "tag") == ""
    assert not (tree / "dist").exists()


# ---- what the wheel holds ----


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where the tools cannot be fetched."""
    folder = str(tmp_path_factory.mktemp("index"))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "build"]
    if subprocess.run(pip, capture_output=True, timeout=120, check=False).returncode:
        pytest.skip("pip reaches no package index")


@pytest.mark.usefixtures("index")
def test_the_wheel_must_hold_every_file_of_the_packages_and_nothing_else(release: Any, tree: Path) -> None:
    """One with both faults, each of which is named; a tree without any is built below."""
    write(tree, "kernels/unit.cu", "// a file that [tool.setuptools.package-data] does not name\n")
    write(tree, "test/__init__.py", "")
    write(tree, "pyproject.toml", PROJECT.replace('packages = ["', 'packages = ["test", "'))
    with pytest.raises(release.NotReady) as refused:
        release.build(tree, tree / "dist")
    assert re.search(r"W101: .*\n.*sgl_importance_kernels/unit\.cu", str(refused.value))
    assert re.search(r"W10[23]: (.*\n)*.*test", str(refused.value))


# ---- the tag, and the wheel where there is nothing else ----


def test_only_what_works_is_tagged(release: Any, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps in their order; what they do is tested above and below."""
    monkeypatch.setattr(release, "build", lambda root, out: [out / "made.whl"])

    def breaks(wheels: list[Path], *, anew: bool) -> None:
        raise release.NotReady("it does not import")

    monkeypatch.setattr(release, "try_out", breaks)
    with pytest.raises(release.NotReady, match="does not import"):
        release.release(tree, tree / "dist", tag=True)
    assert git(tree, "tag") == ""
    monkeypatch.setattr(release, "try_out", lambda wheels, *, anew: None)
    release.release(tree, tree / "dist", tag=False)
    assert git(tree, "tag") == ""
    release.release(tree, tree / "dist", tag=True)
    assert git(tree, "tag") == f"v{VERSION}\n"


@pytest.mark.usefixtures("index")
def test_the_wheel_works_where_there_is_nothing_else(release: Any, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/release.py"), "--out", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "modules of sgl_importance import" in done.stdout
    assert "modules of sgl_importance_lab import" in done.stdout
    assert "a command of the laboratory says how to get it" in done.stdout
    assert "==> Works" in done.stdout
    version = release.project(ROOT)["project"]["version"]
    made = {file.name for file in (tmp_path / "dist").iterdir()}
    assert made == {
        f"{name}-{version}{kind}"
        for name in ("sgl_importance", "sgl_importance_lab")
        for kind in ("-py3-none-any.whl", ".tar.gz")
    }
