"""scripts/release.py: what keeps a tree from being tagged, what the wheel holds, and that it works alone."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
VERSION = "1.2.3"
READY = (
    f"# Changelog\n\n## [Unreleased]\n\n## [{VERSION}] - 2026-11-21\n\n- First.\n\n## [1.2.2] - 2026-01-01\n"
)


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts/release.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A committed tree that may be tagged, with the packages' folders and one module in each."""
    root = tmp_path / "tree"
    for name in (
        "sgl_importance/a.py",
        "python/sglang_importance/ui/index.html",
        "kernels/flashinfer/unit.cu",
        "sgl_importance/.gitignore",
        "test/test_a.py",
        "README.md",
        "LICENSE",
        "MANIFEST.in",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "CHANGELOG.md").write_text(READY)
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "all")
    return root


def test_a_tree_that_is_ready_has_no_problem(release: Any, tree: Path) -> None:
    assert release.version_problems(tree, VERSION) == []
    assert release.tag_problems(tree, VERSION) == []


@pytest.mark.parametrize(
    ("changelog", "said"),
    [
        ("## [Unreleased]\n- New.\n", "has no section for 1.2.3 (it has none yet)"),
        ("## [1.2.2] - 2026-01-01\n", "its newest is 1.2.2"),
        ("## [1.2.3]\n", "needs the day of the release"),
        ("## [1.2.3] - soon\n", "needs the day of the release"),
        (
            "## [Unreleased]\n\n- New.\n\n## [1.2.3] - 2026-11-21\n",
            "move what stands under '## [Unreleased]'",
        ),
    ],
)
def test_a_changelog_of_another_version_is_a_problem(
    release: Any, tree: Path, changelog: str, said: str
) -> None:
    (tree / "CHANGELOG.md").write_text(changelog)
    (problem,) = release.version_problems(tree, VERSION)
    assert said in problem


def test_a_module_of_another_version_is_a_problem(release: Any, tree: Path) -> None:
    (tree / "sgl_importance/a.py").write_text('__version__ = "1.2.2"\n')
    (problem,) = release.version_problems(tree, VERSION)
    assert problem.startswith("sgl_importance/a.py says __version__ = 1.2.2")


def test_versions_are_written_in_one_way(release: Any, tree: Path) -> None:
    assert any("write it as 1.2.3" in problem for problem in release.version_problems(tree, "1.2"))


def test_uncommitted_changes_and_a_used_tag_are_problems(release: Any, tree: Path) -> None:
    (tree / "new.py").write_text("")
    git(tree, "tag", f"v{VERSION}")
    changes, used = release.tag_problems(tree, VERSION)
    assert "1 uncommitted changes, such as '?? new.py'" in changes
    assert f"the tag v{VERSION} exists" in used


# ---- what is in the files ----

WHEEL = {
    "sgl_importance/a.py",
    "sglang_importance/ui/index.html",
    "sgl_importance_kernels/flashinfer/unit.cu",
}
SDIST = {"sgl_importance/a.py", "python/sglang_importance/ui/index.html", "kernels/flashinfer/unit.cu"}


def made_files(release: Any, folder: Path, in_wheel: set[str], in_sdist: set[str]) -> tuple[Path, Path]:
    sdist, wheel = folder / "made.tar.gz", folder / "made.whl"
    metadata = {f"sgl_importance-{VERSION}.dist-info/{name}" for name in release.MADE_BY_WHEEL}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in in_wheel | metadata:
            archive.writestr(name, "")
    with tarfile.open(sdist, "w:gz") as archive:
        for name in in_sdist | release.BESIDE_SOURCES | release.MADE_BY_SDIST:
            archive.addfile(tarfile.TarInfo(f"sgl_importance-{VERSION}/{name}"))
    return sdist, wheel


@pytest.mark.parametrize(
    ("in_wheel", "in_sdist", "said"),
    [
        (WHEEL, SDIST, []),
        (
            WHEEL - {"sglang_importance/ui/index.html"},
            SDIST,
            ["made.whl lacks sglang_importance/ui/index.html"],
        ),
        (WHEEL | {"test/test_a.py"}, SDIST, ["made.whl holds test/test_a.py"]),
        (WHEEL, SDIST - {"kernels/flashinfer/unit.cu"}, ["made.tar.gz lacks kernels/flashinfer/unit.cu"]),
        (WHEEL, SDIST | {"shared/data.bin"}, ["made.tar.gz holds shared/data.bin"]),
    ],
)
def test_the_files_hold_the_packages_and_nothing_else(
    release: Any, tree: Path, tmp_path: Path, in_wheel: set[str], in_sdist: set[str], said: list[str]
) -> None:
    made = made_files(release, tmp_path, in_wheel, in_sdist)
    problems = release.content_problems(tree, VERSION, *made)
    assert len(problems) == len(said)
    assert all(problem.startswith(wanted) for problem, wanted in zip(problems, said, strict=True))


# ---- the tag ----


@pytest.fixture
def built(release: Any, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script over that tree, with its files made and found to work."""
    project = (
        (tree / "pyproject.toml").read_text().replace('\nversion = "', f'\nversion = "{VERSION}" # "', 1)
    )
    (tree / "pyproject.toml").write_text(project)
    for key, value in {"GIT_AUTHOR_NAME": "A", "GIT_COMMITTER_NAME": "A"}.items():
        monkeypatch.setenv(key, value)
    for key in ("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(key, "a@example.org")
    git(tree, "commit", "--all", "--quiet", "--message", "version")
    monkeypatch.setattr(release, "ROOT", tree)
    monkeypatch.setattr(release, "run", lambda *command, cwd=tree: git(tree, *command[1:]))
    monkeypatch.setattr(release, "build", lambda root, out: made_files(release, tmp_path, WHEEL, SDIST))
    monkeypatch.setattr(release, "empty_environment", lambda folder, wheel, anew: folder)
    monkeypatch.setattr(release, "try_out", lambda python, version: None)
    return release


def test_nothing_is_tagged_unless_asked_for(
    built: Any, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built.release(tree / "dist", tag=False)
    assert git(tree, "tag") == ""
    assert "Works: --tag tags it" in capsys.readouterr().out
    built.release(tree / "dist", tag=True)
    assert git(tree, "tag") == f"v{VERSION}\n"
    assert "Nothing" not in capsys.readouterr().out


def test_a_tree_that_is_not_ready_is_not_tagged(built: Any, tree: Path) -> None:
    (tree / "sgl_importance/a.py").write_text("changed = 1\n")
    with pytest.raises(built.NotReady, match=r"^error: 1 uncommitted changes"):
        built.release(tree / "dist", tag=True)
    assert git(tree, "tag") == ""


def test_files_that_lack_something_are_not_tagged(built: Any, tree: Path) -> None:
    (tree / "sgl_importance/b.py").write_text("")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "b")
    with pytest.raises(built.NotReady, match=r"made.whl lacks sgl_importance/b.py"):
        built.release(tree / "dist", tag=True)
    assert git(tree, "tag") == ""


# ---- the wheel where there is nothing else ----


def test_the_wheel_works_where_there_is_nothing_else(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), "build"]
    if subprocess.run(pip, capture_output=True, timeout=120, check=False).returncode:
        pytest.skip("pip reaches no package index")
    command = [sys.executable, str(ROOT / "scripts/release.py"), "--out", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "modules of the core import" in done.stdout
    assert "==> Works" in done.stdout
    assert {file.suffix for file in (tmp_path / "dist").iterdir()} == {".whl", ".gz"}
