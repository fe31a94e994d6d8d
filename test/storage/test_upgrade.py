"""An upgrade of sglang: what was learnt and pinned is kept, stored pages are misses, and the old ones go."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from support.fuzz import run
from support.kept import wait_until_kept
from support.models import write_random_llama
from support.python_path import CHECKS, python_path
from support.servers import ServerProcess

pytestmark = pytest.mark.server

FLAGS = (
    *("--kv-policy", "importance", "--skip-tokenizer-init", "--attention-backend", "torch_native"),
    *("--page-size", "16", "--max-total-tokens", "2048", "--hicache-ratio", "2"),
    *("--hicache-storage-prefetch-policy", "wait_complete", "--kv-importance-prewarm", "off"),
)
PINNED_TOKENS = 160
STORED_TOKENS = 320  # upstream looks for no less than 256 tokens in storage
OTHER_RELEASE = CHECKS / "other_release"


def asked(server: ServerProcess, prompt: list[int]) -> dict:
    return server.generate(prompt, max_new_tokens=4, ignore_eos=True)


def from_storage(reply: dict) -> int:
    return (reply["meta_info"]["cached_tokens_details"] or {}).get("storage", 0)


def store(*words: str) -> dict:
    code, printed, error = run(["store", *words, "--json"])
    assert code == 0, error
    return json.loads(printed)


def test_an_upgrade_of_sglang(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_random_llama(model)
    flags = (*FLAGS, "--kv-importance-store", str(tmp_path / "store"))
    rng = random.Random(1)
    documents = [rng.choices(range(10, 1000), k=STORED_TOKENS + 10) for _ in range(3)]
    with ServerProcess(*flags, model=model) as server:
        pin = server.post("/kv_importance/pin", {"input_ids": documents[0][:PINNED_TOKENS]})
        answers = [asked(server, document)["output_ids"] for document in documents]
        wait_until_kept(server)
    (before,) = store("stat", str(tmp_path / "store"))["models"]
    # The same release would find everything: test/serve/test_restart.py.
    assert before["pages"] >= len(documents) * STORED_TOKENS // 16

    with ServerProcess(*flags, model=model, env=python_path(OTHER_RELEASE)) as server:
        (held,) = server.get("/kv_importance/pins")["pins"]
        assert (held["pin_id"], held["tokens"]) == (pin["pin_id"], PINNED_TOKENS)
        known = re.search(r"KV importance ledger .*: (\d+) pages known, 1 pins, (\d+) requests", server.log())
        assert known is not None
        assert int(known[1]) >= len(documents) * STORED_TOKENS // 16
        assert int(known[2]) > len(documents)
        replies = [asked(server, document) for document in documents]
        assert [from_storage(reply) for reply in replies] == [0, 0, 0]
        assert [reply["output_ids"] for reply in replies] == answers
        (held,) = server.get("/kv_importance/pins")["pins"]
        assert held["resident_tokens"] == PINNED_TOKENS
        wait_until_kept(server)

    new, old = store("stat", str(tmp_path / "store"))["models"]
    assert (new["facts"]["sglang"], old["identity"]) == ("0.5.99", before["identity"])
    assert {name for name in new["facts"] if new["facts"][name] != old["facts"][name]} == {"sglang"}
    assert new["pages"] >= len(documents) * STORED_TOKENS // 16
    # Nobody asks for them again: whatever bounds the store takes them first.
    left = store("gc", str(tmp_path / "store"), "--bytes", str(new["bytes"]))
    assert left["evicted_pages"] == old["pages"]
    (kept,) = (each for each in store("stat", str(tmp_path / "store"))["models"] if each["pages"])
    assert (kept["identity"], kept["pages"]) == (new["identity"], new["pages"])
