"""What is left to the nightly run: the list fits the tree, is marked, and is told at the end of a run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support.nightly_modules import NIGHTLY, OTHER, nightly_kind, what_is_left

ROOT = Path(__file__).parents[2]


def test_every_module_of_the_list_is_there_and_named_once() -> None:
    listed = [path for paths in NIGHTLY.values() for path in paths]
    assert [path for path in listed if not (ROOT / path).exists()] == []
    assert len(listed) == len(set(listed))
    assert all(path.endswith("/") == (ROOT / path).is_dir() for path in listed)


def test_a_folder_holds_its_modules_and_no_namesakes() -> None:
    assert nightly_kind("test/benchmark/test_text.py") == "benchmarks"
    assert nightly_kind("test/benchmark_more/test_text.py") is None
    assert nightly_kind("test/serve/test_restart.py") is None


def test_by_day_they_are_neither_imported_nor_run_and_the_end_says_so() -> None:
    words = ["--collect-only", "-q", "-p", "no:cacheprovider", "benchmark/lab/test/kv_size"]
    # Named, a module is imported; its tests are left out all the same.
    words.append("benchmark/lab/test/policies/test_agreement.py")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    modules, tests = r"(\d+) modules \(laboratory \1\)", r"(\d+) tests \(laboratory \2\)"
    said = re.search(f"Left to scripts/nightly.sh: {modules} and {tests}", ran.stdout)
    assert said, ran.stdout
    assert int(said[1]) >= 2
    assert "test_sizes.py::" in ran.stdout
    assert "test_agreement.py::" not in ran.stdout


def test_the_line_names_kinds_and_adds_up() -> None:
    line = what_is_left({"modes": 2, "families": 1}, {"modes": 1200, OTHER: 34})
    assert line == (
        "Left to scripts/nightly.sh: 3 modules (families 1, modes 2) and "
        "1,234 tests (modes 1,200, more examples and cases 34)"
    )
    assert what_is_left({}, {}) == ""
