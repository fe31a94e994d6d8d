"""Builds a release, checks it as a stranger would get it, and tags it when asked to.

    python scripts/release.py          # a rehearsal: everything but the tag
    python scripts/release.py --tag

Needs only the standard library; what scripts/pins-release.txt names is installed into .cache/release.
Nothing is pushed or uploaded: the last line says how.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "scripts" / "pins-release.txt"
CHECKS = ROOT / "scripts" / "check_install.py"
CACHE = ROOT / ".cache" / "release"
BESIDE_SOURCES = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
MADE_BY_SDIST = {"PKG-INFO", "setup.cfg"}
MADE_BY_WHEEL = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}


class NotReady(Exception):
    """What keeps this tree from being a release, with the cure."""


def step(text: str) -> None:
    print(f"==> {text}", flush=True)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Its output; ends with the command's own words where it fails."""
    # A checkout on PYTHONPATH would stand in for the wheel.
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NotReady(
            f"{' '.join(str(part) for part in command)} failed:\n{done.stdout}{done.stderr}".strip()
        )
    return done.stdout


# ---- is the tree what its version says? ----


def files_of_tree(root: Path) -> list[str]:
    """What git tracks, and what it would track: the build sees neither caches nor earlier builds."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=root).split("\0")
    return [name for name in listed if name and (root / name).is_file()]


def version_problems(root: Path, version: str) -> list[str]:
    """Places that name another version than pyproject.toml, and what a tag of it would miss."""
    problems = []
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        problems.append(f"version '{version}' in pyproject.toml: write it as 1.2.3 or 1.2.3rc1")
    changelog = (root / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## \[([^\]]+)\](?: - (\S+))?\s*$", changelog, re.MULTILINE)
    released = [(name, date) for name, date in sections if name != "Unreleased"]
    if not released or released[0][0] != version:
        newest = f"its newest is {released[0][0]}" if released else "it has none yet"
        problems.append(
            f"CHANGELOG.md has no section for {version} ({newest}): rename '## [Unreleased]' to "
            f"'## [{version}] - YYYY-MM-DD', or correct the version in pyproject.toml"
        )
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", released[0][1]):
        problems.append(f"CHANGELOG.md: '## [{version}]' needs the day of the release, ' - YYYY-MM-DD'")
    unreleased = re.search(r"^## \[Unreleased\]\s*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if released and unreleased and unreleased[1].strip():
        problems.append(f"CHANGELOG.md: move what stands under '## [Unreleased]' to '## [{version}]'")
    for folder in ("sgl_importance", "python/sglang_importance"):
        for file in sorted((root / folder).rglob("*.py")):
            for found in re.findall(r"^__version__ = [\"'](.*)[\"']", file.read_text(), re.MULTILINE):
                if found != version:
                    problems.append(f"{file.relative_to(root)} says __version__ = {found}: remove that line")
    return problems


def tag_problems(root: Path, version: str) -> list[str]:
    problems = []
    if changes := run("git", "status", "--porcelain", cwd=root).splitlines():
        problems.append(f"{len(changes)} uncommitted changes, such as '{changes[0]}': commit or remove them")
    if run("git", "tag", "--list", f"v{version}", cwd=root).strip():
        problems.append(f"the tag v{version} exists: raise the version in pyproject.toml")
    return problems


# ---- build ----


def tools() -> Path:
    """A Python with build and twine, made once for each state of the pins."""
    folder, wanted = CACHE / "tools", hashlib.sha256(PINS.read_bytes()).hexdigest()
    stamp = folder / ".pins"
    if not stamp.exists() or stamp.read_text() != wanted:
        step("Installing build and twine")
        venv.create(folder, clear=True, with_pip=True)
        install(folder / "bin/python", "--no-compile", "--no-deps", "--requirement", PINS)
        stamp.write_text(wanted)
    return folder / "bin/python"


def install(python: Path, *arguments: str | Path) -> None:
    run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--disable-pip-version-check",
        "--no-input",
        *arguments,
    )


def build(root: Path, out: Path) -> tuple[Path, Path]:
    """Source distribution, and the wheel made of it, so that the former is known to be complete."""
    python = tools()
    step("Building the source distribution, and the wheel from it")
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in files_of_tree(root):
            copy = Path(folder) / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, copy)
        run(python, "-m", "build", "--no-isolation", "--outdir", out, folder)
    run(python, "-m", "twine", "check", "--strict", *out.iterdir())
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


# ---- does it hold what it should, and nothing else? ----


def package_files(root: Path) -> dict[str, str]:
    """Every file of the packages: its name in the tree, and in the wheel."""
    folders = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    return {
        name: f"{package}/{name.removeprefix(folder + '/')}"
        for name in files_of_tree(root)
        for package, folder in folders.items()
        if name.startswith(folder + "/") and Path(name).name != ".gitignore"
    }


def differences(what: str, held: Iterable[str], wanted: Iterable[str]) -> list[str]:
    held, wanted = set(held), set(wanted)
    cure = "see [tool.setuptools] in pyproject.toml and MANIFEST.in"
    missing = [f"{what} lacks {name}: {cure}" for name in sorted(wanted - held)]
    return missing + [
        f"{what} holds {name}, which is no part of it: {cure}" for name in sorted(held - wanted)
    ]


def content_problems(root: Path, version: str, sdist: Path, wheel: Path) -> list[str]:
    sources = package_files(root)
    metadata = {f"sgl_importance-{version}.dist-info/{name}" for name in MADE_BY_WHEEL}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = [name for name in archive.namelist() if not name.endswith("/")]
    with tarfile.open(sdist) as archive:
        members = [member.name.partition("/")[2] for member in archive if member.isfile()]
    in_sdist = [name for name in members if not name.startswith("sgl_importance.egg-info/")]
    return differences(wheel.name, in_wheel, {*sources.values(), *metadata}) + differences(
        sdist.name, in_sdist, {*sources, *BESIDE_SOURCES, *MADE_BY_SDIST}
    )


# ---- does it work where there is nothing else? ----


def empty_environment(folder: Path, wheel: Path, *, anew: bool) -> Path:
    """A Python that has the wheel and what it asks for.

    Unless ``anew``, an environment made for the same pyproject.toml is taken again, with the new wheel.
    """
    stamp, wanted = folder / ".project", hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    python = folder / "bin/python"
    if not anew and stamp.exists() and stamp.read_text() == wanted:
        step("Installing the wheel")
        install(python, "--force-reinstall", "--no-deps", wheel)
    else:
        step("Installing the wheel into an empty environment")
        venv.create(folder, clear=True, with_pip=True)
        install(python, wheel)
        stamp.write_text(wanted)
    return python


def try_out(python: Path, version: str) -> None:
    """Runs scripts/check_install.py there, in a folder without a checkout."""
    step("Running the core without sglang and torch")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(CHECKS, folder)
        print(run(python, "-P", Path(folder) / CHECKS.name, version, cwd=Path(folder)), end="")


def fail_with(problems: Sequence[str]) -> None:
    if problems:
        raise NotReady("\n".join(f"error: {problem}" for problem in problems))


def release(out: Path, *, tag: bool) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    step(f"sgl-importance {version}")
    in_the_way = version_problems(ROOT, version) + tag_problems(ROOT, version)
    if tag:
        fail_with(in_the_way)
    sdist, wheel = build(ROOT, out)
    fail_with(content_problems(ROOT, version, sdist, wheel))
    try_out(empty_environment(CACHE / "empty", wheel, anew=tag), version)
    for file in (sdist, wheel):
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}")
    if not tag:
        step(
            "Works. Nothing was tagged: give --tag when these are settled"
            if in_the_way
            else "Works: --tag tags it"
        )
        for problem in in_the_way:
            print(f"    {problem}")
        return
    run("git", "tag", "--annotate", f"v{version}", "--message", f"sgl-importance {version}")
    step(f"Tagged v{version}. To publish: git push origin v{version}, then twine upload {out}/*")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tag", action="store_true", help="tag the commit; without it nothing is tagged")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="emptied, then filled; dist by default"
    )
    arguments = parser.parse_args()
    try:
        release(arguments.out.resolve(), tag=arguments.tag)
    except NotReady as problem:
        sys.exit(str(problem))


if __name__ == "__main__":
    main()
