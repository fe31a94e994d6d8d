"""Breaks lines that matter, one at a time, in a copy of the tree, and names the test that noticed.

    python scripts/mutations.py --jobs 2                       # every row of the table: half an hour
    python scripts/mutations.py --jobs 2 --resume              # those of which something changed since
    python scripts/mutations.py --only fold-halving,own-mass   # some of them; writes no results

The table is scripts/mutations.toml: which line, how it is broken, what a user would suffer from it, and the
tests that should notice. A whole run writes benchmark/results/mutations.json, from which
docs/generated/status.md is made, row by row. It ends with 1 where a broken line goes unnoticed.

Tools that make mutations (mutmut, cosmic-ray) break every line by fixed operators: they take neither a
line's broken twin nor the tests of each line.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import tempfile
import time
import tomllib
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import RESULTS, write_results
from scripts.tree_copy import READ_BY_SGLANG, SELECTED, TreeCopy

from support.nightly_modules import nightly_kind

TABLE = ROOT / "scripts/mutations.toml"
RUN_SECONDS = 600.0

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
    """Of the row, of the file that it breaks, of its tests and of their kinds: eight hexadecimal digits."""
    found = zlib.crc32(repr(mutation).encode())
    modules = [test.partition("::")[0] for test in mutation.tests]
    if any(kinds := [nightly_kind(module) for module in modules]):
        found = zlib.crc32(repr(kinds).encode(), found)
    for name in (mutation.file, *modules):
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


def try_mutation(copy: TreeCopy, mutation: Mutation) -> Row:
    """Breaks the line, runs its tests and puts the line back; a row of the results.

    The nightly ones among its tests run where those of every run have not noticed.

    Raises:
        BadTable: the test that failed fails as well when nothing is broken.
    """
    file = copy.root / mutation.file
    whole = file.read_text()
    assert whole.count(mutation.line) == 1
    began = time.monotonic()
    file.write_text(whole.replace(mutation.line, mutation.broken))
    first_failure = partial(
        copy.first_failure, seconds=RUN_SECONDS, is_warm=not mutation.file.startswith(READ_BY_SGLANG)
    )
    try:
        for run in SELECTED:
            ended, test = first_failure(mutation.tests, run=run)
            if ended not in ("passed", "none selected"):
                break
    finally:
        file.write_text(whole)
    if test and first_failure([test], run=run)[0] != "passed":
        raise BadTable(f"{mutation.name}: with nothing broken, too, it does not pass: {test}")
    outcome = {"failed": "noticed", "passed": "survived", "none selected": "survived"}.get(ended, ended)
    return {
        "mutation": mutation.name,
        "file": mutation.file,
        "breaks": mutation.breaks,
        "outcome": outcome,
        "noticed_by": test,
        "run": run if test else None,
        "checksum": checksum(copy.root, mutation),
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
        BadTable: a row does not fit the tree, or the test that failed fails as well when nothing is broken.
    """
    if found := problems(root, mutations):
        raise BadTable("\n".join(found))
    copies: queue.SimpleQueue[TreeCopy] = queue.SimpleQueue()

    def run_one(mutation: Mutation) -> Row:
        copy = copies.get()
        try:
            row = try_mutation(copy, mutation)
        finally:
            copies.put(copy)
        print(f"{row['outcome']}: {mutation.name}: {row['noticed_by']} ({row['seconds']} s)", flush=True)
        return row

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number in range(jobs):
            (folder / str(number)).mkdir()
            copies.put(stack.enter_context(closing(TreeCopy(root, folder / str(number)))))
        rows = []
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        for row in pool.map(run_one, mutations):
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
    unnoticed = [f"{name} ({row['outcome']})" for name, row in rows.items() if row["outcome"] != "noticed"]
    print(f"{len(rows) - len(unnoticed)} of {len(rows)} broken lines were noticed")
    if not arguments.only:
        print(path)
    if unnoticed:
        sys.exit(f"error: no test noticed {', '.join(unnoticed)}")


if __name__ == "__main__":
    main()
