"""Builds a release, checks it as a stranger would get it, and tags it when asked to.

    python scripts/release.py          # a rehearsal: everything but the tag
    python scripts/release.py --tag

Needs only the standard library and pip; what scripts/pins-release.txt names is installed into .cache/release.
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
import tempfile
import tomllib
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "release"
DISTRIBUTIONS = (".", "benchmark/lab")  # what serves, and the laboratory on top of it


class NotReady(Exception):
    """What keeps this tree from being a release, with the cure."""


def step(text: str) -> None:
    print(f"==> {text}", flush=True)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Its output; ends with the command's own words where it fails."""
    # A checkout on PYTHONPATH would stand in for the wheel.
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReady(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}".strip())
    return done.stdout


def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())


def problems(root: Path) -> list[str]:
    """What keeps the tree from being tagged with the version of its pyproject.toml."""
    version, found = project(root)["project"]["version"], []
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        found.append(f"version '{version}' in pyproject.toml: write it as 1.2.3 or 1.2.3rc1")
    for folder in DISTRIBUTIONS[1:]:
        if (other := project(root / folder)["project"]["version"]) != version:
            found.append(
                f"version '{other}' in {folder}/pyproject.toml: write {version}, as in pyproject.toml"
            )
    changelog = (root / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[(?!Unreleased\])([^\]]+)\](?: - (\S+))?", changelog, re.MULTILINE)
    if newest is None or newest[1] != version or not re.fullmatch(r"\d{4}-\d\d-\d\d", newest[2] or ""):
        said = f"its newest is '{newest[0]}'" if newest else "it has none yet"
        cure = f"rename '## [Unreleased]' to '## [{version}] - YYYY-MM-DD', or correct pyproject.toml"
        found.append(f"CHANGELOG.md has no section for {version} with a day ({said}): {cure}")
    elif re.search(r"^## \[Unreleased\]\s*\n(?!\s*(## |\Z))", changelog, re.MULTILINE):
        found.append(f"CHANGELOG.md: move what stands under '## [Unreleased]' to '## [{version}]'")
    if changes := run("git", "status", "--porcelain", cwd=root).splitlines():
        found.append(f"{len(changes)} uncommitted changes, such as '{changes[0]}': commit or remove them")
    if run("git", "tag", "--list", f"v{version}", cwd=root).strip():
        found.append(f"the tag v{version} exists: raise the version in pyproject.toml")
    return found


def environment(name: str, *packages: str | Path, made_for: bytes, anew: bool = False) -> Path:
    """The programs of an environment below .cache/release; made again for other contents of ``made_for``."""
    folder, wanted = CACHE / name, hashlib.sha256(made_for).hexdigest()
    if anew or not (folder / ".made-for").exists() or (folder / ".made-for").read_text() != wanted:
        venv.create(folder, clear=True)
        install(folder / "bin", *packages)
        (folder / ".made-for").write_text(wanted)
    return folder / "bin"


def install(programs: Path, *packages: str | Path) -> None:
    """Into an environment, with the pip that is here: one of its own would take longer to install."""
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install")
    run(*pip, "--quiet", "--disable-pip-version-check", "--no-input", "--no-compile", *packages)


def build(root: Path, out: Path) -> list[Path]:
    """Source distributions, and the wheels made of them; fails unless each holds its packages and no more."""
    pins = ROOT / "scripts/pins-release.txt"
    tools = environment("tools", "--no-deps", "--requirement", pins, made_for=pins.read_bytes())
    shutil.rmtree(out, ignore_errors=True)
    wheels = []
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=root).split("\0")
    with tempfile.TemporaryDirectory() as folder:  # without caches and earlier builds
        tree = Path(folder) / "tree"
        for name in filter(lambda name: name and (root / name).is_file(), listed):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, tree / name)
        for distribution in DISTRIBUTIONS:
            step(f"Building the source distribution of {distribution}, and the wheel from it")
            source = tree / distribution
            built = source / "dist"
            run(tools / "python", "-m", "build", "--no-isolation", "--outdir", built, source)
            packages = project(source)["tool"]["setuptools"]["package-dir"]
            expected = Path(folder) / "expected" / distribution
            for package, of in packages.items():
                shutil.copytree(source / of, expected / package)
            (wheel,) = built.glob("*.whl")
            run(tools / "twine", "check", "--strict", *built.iterdir())
            names = ("--toplevel", ",".join(packages), "--src-dir", expected)
            # Embedded models have files in common, and each folder must be whole: no check for duplicates.
            run(tools / "check-wheel-contents", "--no-config", "--ignore", "W002", *names, wheel)
            shutil.copytree(built, out, dirs_exist_ok=True)
            wheels.append(out / wheel.name)
    return wheels


def try_out(wheels: list[Path], *, anew: bool) -> None:
    """Runs scripts/check_install.py where only what serves is installed, then where the laboratory is too."""
    for what, installed in (("core", wheels[:1]), ("laboratory", wheels)):
        step(f"Running the {what} without sglang and torch")
        asked_for = [(ROOT / folder / "pyproject.toml").read_bytes() for folder in DISTRIBUTIONS]
        # As long as what they ask for is the same, so are their dependencies.
        made_for = b"".join(asked_for[: len(installed)])
        programs = environment(what, *installed, made_for=made_for, anew=anew)
        install(programs, "--force-reinstall", "--no-deps", *installed)
        with tempfile.TemporaryDirectory() as folder:  # without a checkout
            shutil.copy(ROOT / "scripts/check_install.py", folder)
            print(run(programs / "python", "-P", "check_install.py", cwd=Path(folder)), end="")


def release(root: Path, out: Path, *, tag: bool) -> None:
    version = project(root)["project"]["version"]
    step(f"sgl-importance {version}")
    in_the_way = problems(root)
    if tag and in_the_way:
        raise NotReady("\n".join(f"error: {problem}" for problem in in_the_way))
    try_out(build(root, out), anew=tag)
    if tag:
        run("git", "tag", "--annotate", f"v{version}", "--message", f"sgl-importance {version}", cwd=root)
        step(f"Tagged v{version}. To publish: git push origin v{version}, then twine upload {out}/*")
    elif in_the_way:
        step("Works. Nothing was tagged: give --tag when these are settled")
        print("\n".join(f"    {problem}" for problem in in_the_way))
    else:
        step("Works: --tag tags it")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tag", action="store_true", help="tag the commit; without it nothing is tagged")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="emptied, then filled; dist by default"
    )
    arguments = parser.parse_args()
    try:
        release(ROOT, arguments.out.resolve(), tag=arguments.tag)
    except NotReady as problem:
        sys.exit(str(problem))


if __name__ == "__main__":
    main()
