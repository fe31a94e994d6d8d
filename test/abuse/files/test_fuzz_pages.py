"""Spoiled pages of the store are never served."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from sgl_importance.storage.inspect import files_of, summarize, verify
from sgl_importance.storage.page_record import PageMiss
from sgl_importance.storage.store import PageStore
from sgl_importance.storage.store_counters import StoreCounters

from support.fuzz import check_one_line, damage, examples, json_lines, nested
from support.page_files import page_file

MODEL = bytes(range(32))
PAGE_BYTES = 512


@examples(120, 20_000)
def test_a_spoiled_page_is_never_served(tmp_path: Path, count: int) -> None:
    rng = random.Random(1)
    store = PageStore(tmp_path, budget_bytes=1 << 20, counters=StoreCounters())
    right = np.frombuffer(rng.randbytes(PAGE_BYTES), np.uint8)
    store.write(MODEL, "key", right, depth=3, moment=10**18)
    path = page_file(store, MODEL, "key")
    intact = path.read_bytes()
    body = np.empty(PAGE_BYTES, np.uint8)
    misses = 0
    for _ in range(count):
        spoiled = damage(rng, intact)
        path.write_bytes(spoiled)
        found = verify(tmp_path, quarantine=False, files=files_of(tmp_path), advance=lambda size: None)
        assert bool(found.damaged) == (spoiled != intact)
        try:
            store.read(MODEL, "key", body)
        except PageMiss:
            misses += 1
        else:
            assert spoiled == intact
            assert (body == right).all()
    assert misses > 0.9 * count


@examples(80, 5000)
def test_a_spoiled_identity_is_unknown(tmp_path: Path, count: int) -> None:
    rng = random.Random(2)
    store = PageStore(tmp_path, budget_bytes=1 << 20, counters=StoreCounters())
    store.write(MODEL, "key", np.zeros(PAGE_BYTES, np.uint8), depth=0, moment=10**18)
    facts = {
        "weights": "ab",
        "weights_version": "1",
        "tp_rank": 0,
        "tp_size": 1,
        "page_size": 16,
        "dtype": "f",
    }
    store.describe(MODEL, json.dumps(facts))
    path = page_file(store, MODEL, "key").with_name("identity.json")
    for _ in range(count):
        path.write_bytes(json_lines(rng, [facts]) if rng.random() < 0.98 else nested(20_000))
        assert summarize(tmp_path)["pages"] == 1
        if rng.random() < 0.1:
            assert check_one_line(["store", "stat", str(tmp_path)]) == 0
