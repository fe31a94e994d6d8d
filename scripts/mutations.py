"""Breaks lines that matter, one at a time, in a copy of the tree, and names the test that noticed.

    python scripts/mutations.py --jobs 2                       # every row of the table, over half an hour
    python scripts/mutations.py --jobs 2 --resume              # those of which something changed since
    python scripts/mutations.py --only fold-halving,own-mass   # some of them; writes no results

The table is scripts/mutations.toml: which line, how it is broken, what a user would suffer from it, and the
tests that should notice. A whole run writes benchmark/results/mutations.json, from which docs/status.md is
rendered, row by row. It ends with 1 where a broken line goes unnoticed.

Tools that make mutations (mutmut, cosmic-ray) break every line by fixed operators: they take neither a
line's broken twin nor the tests of each line.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmark.results import RESULTS, write_results  # noqa: E402

TABLE = ROOT / "scripts/mutations.toml"
PACKAGES = {
    "sgl_importance": "sgl_importance",
    "sglang_importance": "python/sglang_importance",
    "sgl_importance_kernels": "kernels",
}
"""Folder of each package that a line may be in."""
RUN_SECONDS = 600.0
BATCH = 16
"""Rows whose tests run with nothing broken before their turn: what fails there costs no earlier row."""
SELECTED = "not server and not nightly and not gpu"
_SOME_FAILED = 1  # pytest's exit code; others say that no test, or not every test, could be run

Row = dict[str, Any]


class BadTable(Exception):
    """The table does not fit the tree; one line for each problem."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One line that is broken.

    Attributes:
        name: of the row, unique.
        file: path from the root of the tree.
        line: text that is in the file exactly once.
        broken: what stands in its place.
        breaks: what a user would suffer, as a sentence.
        tests: folders, files or single tests that should notice.
    """

    name: str
    file: str
    line: str
    broken: str
    breaks: str
    tests: tuple[str, ...]


def checksum(root: Path, mutation: Mutation) -> str:
    """Of the row, of the file that it breaks, and of its tests: eight hexadecimal digits."""
    found = zlib.crc32(repr(mutation).encode())
    for name in (mutation.file, *(test.partition("::")[0] for test in mutation.tests)):
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else (path,):
            found = zlib.crc32(file.read_bytes(), found)
    return f"{found:08x}"


def read_table(path: Path = TABLE) -> list[Mutation]:
    """The rows of a table.

    Raises:
        BadTable: it cannot be read, or a row lacks something.
    """
    try:
        rows = tomllib.loads(path.read_text())["mutation"]
        return [Mutation(**{**row, "tests": tuple(row["tests"])}) for row in rows]
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise BadTable(f"{path.name}: {error}") from error


def problems(root: Path, mutations: Sequence[Mutation]) -> list[str]:
    """Why rows do not fit the tree below ``root``: one line each; empty where all do."""
    found = []
    names = [mutation.name for mutation in mutations]
    for mutation in mutations:
        file = root / mutation.file
        times = file.read_text().count(mutation.line) if file.is_file() else 0
        if times != 1:
            found.append(f"{mutation.name}: {mutation.file} has its line {times} times, not once")
        if mutation.broken == mutation.line:
            found.append(f"{mutation.name}: the broken line is the line itself")
        if names.count(mutation.name) > 1:
            found.append(f"{mutation.name}: several rows have this name")
        for test in mutation.tests:
            path, _, function = test.partition("::")
            if not (root / path).exists() or (
                function and f"def {function}(" not in (root / path).read_text()
            ):
                found.append(f"{mutation.name}: there is no {test}")
    return found


class Copy:
    """A copy of a tree, whose files can be broken without harm to the tree.

    Args:
        root: of the tree; what git ignores is left out.
        folder: where the copy is made, an empty folder.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / "tree"
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
        for name in listed.split("\0"):
            if name and (root / name).is_file():  # else it is deleted, and git has not been told
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.root / name)
        self._cache = folder / "cache"
        kernels = folder / "names/sgl_importance_kernels"
        kernels.parent.mkdir()
        kernels.symlink_to(self.root / PACKAGES[kernels.name])
        paths = (self.root, self.root / "python", kernels.parent)
        self._environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            # Python takes a compiled file for the source's where size and second of writing are the same.
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self._check_imports()

    def _check_imports(self) -> None:
        """Raises where a package would come from elsewhere: then no broken line could be noticed."""
        packages = [name for name, folder in PACKAGES.items() if (self.root / folder).is_dir()]
        code = "import importlib, sys; [print(importlib.import_module(n).__file__) for n in sys.argv[1:]]"
        command = [sys.executable, "-c", code, *packages]
        printed = subprocess.run(
            command, cwd=self.root, env=self._environment, check=True, capture_output=True, text=True
        ).stdout
        for file in printed.split():
            assert Path(file).resolve().is_relative_to(self.root.resolve()), file

    def first_failure(self, tests: Sequence[str], *, seconds: float) -> tuple[str, str | None]:
        """Runs tests up to the first that fails.

        Returns:
            How it ended ("passed", "failed", "hung" or "not run"), and the test that failed.
        """
        shutil.rmtree(self._cache, ignore_errors=True)
        options = ["-x", "-q", "-m", SELECTED, "--hypothesis-seed=0", "-o", f"cache_dir={self._cache}"]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=self.root,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "hung", None
        if done.returncode == _SOME_FAILED:
            (failed,) = json.loads((self._cache / "v/cache/lastfailed").read_text())
            return "failed", failed
        if done.returncode:
            print(done.stdout[-2000:], file=sys.stderr)
            return "not run", None
        return "passed", None

    def run(self, mutation: Mutation) -> Row:
        """Breaks the line, runs its tests and puts the line back; a row of the results."""
        file = self.root / mutation.file
        whole = file.read_text()
        assert whole.count(mutation.line) == 1
        began = time.monotonic()
        file.write_text(whole.replace(mutation.line, mutation.broken))
        try:
            ended, test = self.first_failure(mutation.tests, seconds=RUN_SECONDS)
        finally:
            file.write_text(whole)
        outcome = {"failed": "noticed", "passed": "survived"}.get(ended, ended)
        return {
            "mutation": mutation.name,
            "file": mutation.file,
            "breaks": mutation.breaks,
            "outcome": outcome,
            "noticed_by": test,
            "checksum": checksum(self.root, mutation),
            "seconds": round(time.monotonic() - began, 1),
        }


def run(
    root: Path,
    mutations: Sequence[Mutation],
    *,
    jobs: int = 1,
    done: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """A row for each mutation, in their order; prints them as they come.

    Args:
        root: of the tree.
        mutations: to try.
        jobs: at a time.
        done: called with each row, in their order.

    Raises:
        BadTable: a row does not fit the tree, or its tests fail though nothing is broken.
    """
    if found := problems(root, mutations):
        raise BadTable("\n".join(found))
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()

    def run_one(mutation: Mutation) -> Row:
        copy = copies.get()
        try:
            row = copy.run(mutation)
        finally:
            copies.put(copy)
        print(f"{row['outcome']}: {mutation.name}: {row['noticed_by']} ({row['seconds']} s)", flush=True)
        return row

    with tempfile.TemporaryDirectory() as folder:
        for number in range(jobs):
            (Path(folder) / str(number)).mkdir()
            copies.put(Copy(root, Path(folder) / str(number)))
        rows = []
        with ThreadPoolExecutor(jobs) as pool:
            for begin in range(0, len(mutations), BATCH):
                batch = mutations[begin : begin + BATCH]
                copy = copies.get()
                tests = sorted({test for mutation in batch for test in mutation.tests})
                ended, test = copy.first_failure(tests, seconds=4 * RUN_SECONDS)
                copies.put(copy)
                if ended != "passed":
                    raise BadTable(f"with nothing broken the tests have {ended} already: {test}")
                for row in pool.map(run_one, batch):
                    rows.append(row)
                    done(row)
        return rows


def kept_rows(path: Path, root: Path, mutations: Sequence[Mutation]) -> dict[str, Row]:
    """Rows of an earlier run, by name, that would be the same today: noticed, and nothing of them changed."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    current = {mutation.name: mutation for mutation in mutations}
    return {
        row["mutation"]: row
        for row in rows
        if row["outcome"] == "noticed"
        and row["mutation"] in current
        and row.get("checksum") == checksum(root, current[row["mutation"]])
    }


def chosen(mutations: Sequence[Mutation], names: str) -> list[Mutation]:
    """Those of a list of names.

    Raises:
        BadTable: there is none of a name.
    """
    wanted = [name.strip() for name in names.split(",")]
    known = {mutation.name: mutation for mutation in mutations}
    if unknown := [name for name in wanted if name not in known]:
        raise BadTable(f"there is no mutation {', '.join(unknown)}: choose from {', '.join(known)}")
    return [known[name] for name in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, choices=range(1, 17), default=1, metavar="N", help="at a time")
    parser.add_argument("--only", metavar="NAMES", help="some rows, by name; writes no results")
    parser.add_argument(
        "--resume", action="store_true", help="keep rows of the results of which nothing changed"
    )
    parser.add_argument("--out", type=Path, help="instead of benchmark/results/mutations.json")
    arguments = parser.parse_args()
    path = arguments.out or RESULTS / "mutations.json"
    try:
        mutations = read_table()
        if arguments.only:
            mutations = chosen(mutations, arguments.only)
        rows = kept_rows(path, ROOT, mutations) if arguments.resume else {}

        def keep(row: Row) -> None:
            rows[row["mutation"]] = row
            if not arguments.only:
                in_order = [rows[each.name] for each in mutations if each.name in rows]
                write_results("mutations", in_order, out=path)

        if left := [each for each in mutations if each.name not in rows]:
            run(ROOT, left, jobs=arguments.jobs, done=keep)
    except BadTable as problem:
        sys.exit(f"error: {problem}")
    except KeyboardInterrupt:
        sys.exit(130)
    unnoticed = [name for name, row in rows.items() if row["outcome"] != "noticed"]
    print(f"{len(rows) - len(unnoticed)} of {len(rows)} broken lines were noticed")
    if not arguments.only:
        print(path)
    if unnoticed:
        sys.exit(f"error: no test noticed {', '.join(unnoticed)}: write one")


if __name__ == "__main__":
    main()
