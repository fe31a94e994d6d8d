"""A copy of the tree whose files can be broken, and whose tests are run: for scripts/mutations.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGES = {
    "sgl_importance": "sgl_importance",
    "sglang_importance": "python/sglang_importance",
    "sgl_importance_kernels": "kernels",
    "sgl_importance_lab": "benchmark/lab/sgl_importance_lab",
}
"""Folder of each package that a line may be in."""
READ_BY_SGLANG = PACKAGES["sglang_importance"] + "/cpu/"
"""Imported while sglang is, and not anew by tests that begin with sglang imported."""
IMPORTED = (
    "sglang.srt.managers.scheduler",
    "sglang_importance.http.routes",
    "sglang_importance.cache.component",
    "hypothesis",
)
SELECTED = {
    "daily": "not server and not gpu and not nightly",
    "nightly": "not server and not gpu and nightly",
}
"""Run of the tests -> which of them notice broken lines."""
WARM_PYTEST = Path(__file__).with_name("warm_pytest.py")
_SOME_FAILED, _NONE_SELECTED = 1, 5  # pytest's exit codes; others say that not every test could be run


class TreeCopy:
    """A copy of a tree, whose files can be broken without harm to the tree. To be closed.

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
        self._log = folder / "log"
        kernels = folder / "names/sgl_importance_kernels"
        kernels.parent.mkdir()
        kernels.symlink_to(self.root / PACKAGES[kernels.name])
        paths = (self.root, self.root / "python", self.root / "benchmark/lab", kernels.parent)
        self._environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            # Python takes a compiled file for the source's where size and second of writing are the same.
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        packages = [name for name, folder in PACKAGES.items() if (self.root / folder).is_dir()]
        self._check_imports(packages)
        self._warm = self._start(IMPORTED if "sglang_importance" in packages else ())

    def close(self) -> None:
        self._end(self._warm)

    def _check_imports(self, packages: Sequence[str]) -> None:
        """Raises where a package would come from elsewhere: then no broken line could be noticed."""
        code = "import importlib, sys; [print(importlib.import_module(n).__file__) for n in sys.argv[1:]]"
        command = [sys.executable, "-c", code, *packages]
        printed = subprocess.run(
            command, cwd=self.root, env=self._environment, check=True, capture_output=True, text=True
        ).stdout
        for file in printed.split():
            assert Path(file).resolve().is_relative_to(self.root.resolve()), file

    def _start(self, modules: Sequence[str]) -> subprocess.Popen[str]:
        with self._log.open("a") as log:  # sglang warns, and at its end libraries name what they leak
            return subprocess.Popen(
                [sys.executable, str(WARM_PYTEST), str(self.root.parent), *modules],
                cwd=self.root,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def _end(self, worker: subprocess.Popen[str]) -> None:
        worker.communicate()
        worker.wait()

    def first_failure(
        self, tests: Sequence[str], *, run: str = "daily", seconds: float, is_warm: bool = True
    ) -> tuple[str, str | None]:
        """Runs tests up to the first that fails.

        Args:
            tests: folders, files or single tests.
            run: a key of ``SELECTED``: those of ``tests`` that belong to it.
            seconds: after which they hang.
            is_warm: sglang has been imported beforehand; not for files that it imports itself.

        Returns:
            How it ended ("passed", "failed", "hung", "none selected" or "not run"), and the test that failed.
        """
        shutil.rmtree(self._cache, ignore_errors=True)
        options = ["-x", "-q", "-m", SELECTED[run], "--hypothesis-seed=0", "-o", f"cache_dir={self._cache}"]
        order = {"words": [*options, *tests], "log": str(self._log), "seconds": seconds}
        worker = self._warm if is_warm else self._start(())
        assert worker.stdin is not None
        assert worker.stdout is not None
        print(json.dumps(order), file=worker.stdin, flush=True)
        answer = worker.stdout.readline()
        assert answer, f"{WARM_PYTEST.name} has ended: {self._log.read_text()[-2000:]}"
        code = json.loads(answer)
        if not is_warm:
            self._end(worker)
        if code is None:
            return "hung", None
        if code == _SOME_FAILED:
            (failed,) = json.loads((self._cache / "v/cache/lastfailed").read_text())
            return "failed", failed
        if code == _NONE_SELECTED:
            return "none selected", None
        if code:
            print(self._log.read_text()[-2000:], file=sys.stderr)
            return "not run", None
        return "passed", None
