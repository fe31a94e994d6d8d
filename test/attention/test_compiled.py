"""What numba compiles, where nothing can be written: a read-only installation without a home."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import sgl_importance.reuse.hazards as hazards
import sgl_importance_kernels.compiled as compiled

from support.nightly_cases import rest_nightly


@pytest.mark.parametrize(
    ("module", "function"), rest_nightly([(hazards, "_hazards"), (compiled, "add_query")])
)
def test_it_compiles_where_there_is_no_place_for_a_cache(
    tmp_path: Path, module: ModuleType, function: str
) -> None:
    assert module.__file__
    (tmp_path / "alone.py").write_text(Path(module.__file__).read_text())
    (tmp_path / "__pycache__").touch()  # so that nobody, not even root, can make the folder
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "IPYTHONDIR"), os.devnull)
    environment = {**os.environ, **nowhere, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", f"import alone; print(len(alone.{function}.signatures))"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "1", done.stderr
