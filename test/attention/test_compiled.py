"""The compiled page scores where nothing can be written: a read-only installation without a home."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import sgl_importance_kernels.compiled as compiled


def test_it_compiles_where_there_is_no_place_for_a_cache(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(Path(compiled.__file__).read_text())
    (tmp_path / "__pycache__").touch()  # so that nobody, not even root, can make the folder
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "IPYTHONDIR"), os.devnull)
    environment = {**os.environ, **nowhere, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", "import alone; print(len(alone.add_query.signatures))"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "1", done.stderr
