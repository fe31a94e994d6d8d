"""The policy inside LMCache's own classes, where LMCache can be imported.

LMCache wants other versions of packages than this project, so it is looked for in a folder of its own:

    pip install --no-deps --target FOLDER lmcache cachetools aiofile caio ...    # what its imports ask for
    SGL_IMPORTANCE_LMCACHE=FOLDER python -m pytest benchmark/lab/test/connectors
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from sgl_importance_lab.connectors import lmcache
from sgl_importance_lab.connectors.lmcache import LMCacheMissing, register

from support.python_path import TEST

DRIVER = TEST / "support/drivers/lmcache_driver.py"
FOLDER = os.environ.get("SGL_IMPORTANCE_LMCACHE")


class Ignorant:
    def get_importance(self, key: bytes) -> None:
        return None


@pytest.fixture(scope="module")
def answers() -> dict[str, dict]:
    if FOLDER is None and find_spec("lmcache") is None:
        pytest.skip("lmcache is not installed, and SGL_IMPORTANCE_LMCACHE names no folder with it")
    path = os.pathsep.join(filter(None, [FOLDER, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}
    run = subprocess.run(
        [sys.executable, str(DRIVER)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("ANSWER ")]
    if not lines and "ModuleNotFoundError" in run.stderr:
        pytest.skip(f"lmcache cannot be imported: {run.stderr.strip().splitlines()[-1]}")
    assert lines, run.stderr[-2000:]
    return json.loads(lines[0].removeprefix("ANSWER "))


def test_stock_lru_evicts_the_document(answers):
    assert answers["lru"] == {"policy": "LRUCachePolicy", "held": [False] * 3, "chunks": 12}


def test_importance_keeps_the_chunk_and_what_leads_to_it(answers):
    assert answers["importance"]["policy"] == "ImportanceCachePolicy"
    assert answers["importance"]["held"] == [True, True, False]
    assert answers["importance"]["chunks"] == 12


def test_a_document_that_nobody_asks_for_leaves(answers):
    assert answers["abandoned"]["held"] == [False] * 3


def test_without_lmcache_one_line_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lmcache, "_POLICIES", "lmcache_is_not_here.policies")
    with pytest.raises(LMCacheMissing, match=r"cannot import lmcache_is_not_here\.policies .*: pip install"):
        register(Ignorant(), page_size=16, chunk_tokens=256)


def test_another_lmcache_is_told_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lmcache, "_POLICIES", "json")
    with pytest.raises(LMCacheMissing, match=r"has no BaseCachePolicy: install lmcache==0\.5\.6"):
        register(Ignorant(), page_size=16, chunk_tokens=256)
