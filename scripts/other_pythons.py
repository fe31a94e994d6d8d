"""Runs the core's tests with other interpreters, without sglang and torch: what needs neither must run there.

    python scripts/other_pythons.py [3.12 3.13]

An interpreter is found as ``pythonX.Y`` on the path, or among pyenv's versions. Each gets an environment of
its own in ``.cache/python-X.Y`` with what pyproject.toml asks for.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TEST = ROOT / "test"
LABORATORY = ROOT / "benchmark/lab"
TESTS = (TEST, LABORATORY / "test")
VERSIONS = ("3.12", "3.13")
EXTRAS = ("hypothesis", "matplotlib", "psutil", "psycopg[binary]", "pytest", "tokenizers", "zstandard")
NOT_CORE = {
    "sglang",
    "sglang_importance",
    "sgl_importance_lab.agree",
    "sgl_importance_lab.offline",
    "sgl_importance_kernels",
    "torch",
    "transformers",
    "benchmark",
    "support.servers",
}
"""A test that imports one of these is not the core's: it needs sglang or torch, or starts a server."""
MARKERS = "not server and not gpu and not triton and (not nightly or nightly_module)"


# ---- which tests ----


def core_tests() -> list[Path]:
    """Test modules of the core; what their helpers import counts."""
    return [path for folder in TESTS for path in sorted(folder.rglob("test_*.py")) if _is_core(path)]


def _is_core(path: Path) -> bool:
    imported = _imports(path)
    for folder in path.parents:
        if (conftest := folder / "conftest.py").exists() and folder != ROOT:
            imported |= frozenset(_imported_modules(conftest, anywhere=False))
        if folder in TESTS:
            break
    return bool(imported & {"sgl_importance", "sgl_importance_lab"}) and not imported & NOT_CORE


@cache
def _imports(path: Path) -> frozenset[str]:
    """What a module imports anywhere, and the packages of that; what its helpers import too."""
    found: set[str] = set()
    for module in _imported_modules(path):
        parts = module.split(".")
        found |= {".".join(parts[:size]) for size in range(1, len(parts) + 1)}
        helper = _helper(module)
        if helper not in (None, path):
            found |= _imports(helper)
    return frozenset(found)


def _imported_modules(path: Path, *, anywhere: bool = True) -> Iterator[str]:
    """Names of modules; those of a module's first level, or also what its functions import when they run."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if anywhere else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def _helper(module: str) -> Path | None:
    """The file of a module below test/ that others import."""
    path = module.replace(".", "/") + ".py"
    folders = (TEST, *(folder for folder in TEST.iterdir() if folder.is_dir()))
    return next((file for folder in folders if (file := folder / path).is_file()), None)


# ---- with which interpreter ----


def find_python(version: str) -> Path | None:
    """An interpreter of that version that runs."""
    named = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [Path(named)] if named else []
    candidates += sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)
    for candidate in candidates:
        done = subprocess.run(
            [candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.stdout.strip() == version:
            return candidate
    return None


def environment(version: str, python: Path) -> Path:
    """The Python of an environment with what the core and the laboratory depend on, and their tests need."""
    folder = ROOT / ".cache" / f"python-{version}"
    projects = [tomllib.loads((each / "pyproject.toml").read_text()) for each in (ROOT, LABORATORY)]
    needed = {each for project in projects for each in project["project"]["dependencies"]}
    wanted = sorted({*needed, *EXTRAS} - {"sgl-importance"})
    stamp = folder / ".wanted"
    if not stamp.exists() or stamp.read_text() != "\n".join(wanted):
        stamp.unlink(missing_ok=True)
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        pip = [
            folder / "bin/python",
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--no-input",
            "--quiet",
        ]
        subprocess.run([*pip, *wanted], check=True, env=_plain_environment())
        subprocess.run(
            [*pip, "--no-deps", "--editable", ROOT, "--editable", LABORATORY],
            check=True,
            env=_plain_environment(),
        )
        stamp.write_text("\n".join(wanted))
    return folder / "bin/python"


def _plain_environment() -> dict[str, str]:
    """Without a checkout on PYTHONPATH, which would stand in for the environment's own."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}


# ---- the run ----


def run_tests(version: str) -> dict[str, Any]:
    """What became of the core's tests under that version."""
    python = find_python(version)
    if python is None:
        return {
            "python": version,
            "outcome": "pending",
            "why": f"no python{version} here: install one and run python scripts/other_pythons.py {version}",
        }
    interpreter = environment(version, python)
    modules = core_tests()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            interpreter,
            "-m",
            "pytest",
            "-q",
            "-m",
            MARKERS,
            f"--junitxml={report}",
            "-p",
            "no:cacheprovider",
        ]
        done = subprocess.run([*command, *modules], cwd=ROOT, env=_plain_environment(), check=False)
        counts = count_tests(report)
    full = subprocess.run(
        [interpreter, "--version"], capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    return {
        "python": full,
        "outcome": "passed" if done.returncode == 0 else "failed",
        "modules": len(modules),
        **counts,
        "seconds": round(time.monotonic() - began, 1),
    }


def count_tests(report: Path) -> dict[str, Any]:
    """Numbers of a JUnit report, and the names of what failed."""
    if not report.exists():
        return {"tests": 0, "failures": ["pytest wrote no report"]}
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {
        "tests": len(cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "failures": [f"{case.get('classname')}.{case.get('name')}" for case in bad],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="X.Y")
    versions = parser.parse_args().versions
    if unfit := [version for version in versions if not re.fullmatch(r"3\.\d+", version)]:
        parser.error(f"{unfit[0]!r} is no version: give one such as 3.12")
    results = [run_tests(version) for version in versions]
    print(json.dumps(results, indent=1))
    sys.exit(any(result["outcome"] == "failed" for result in results))


if __name__ == "__main__":
    main()
