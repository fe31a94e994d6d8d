"""Real servers whose directory is taken away, shared, or another model's: pins and answers are right."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.fuzz import run
from support.models import write_random_llama
from support.servers import ServerProcess
from support.waiting import HANG_SECONDS, wait_until

pytestmark = pytest.mark.server

KEY = "admin-key"
POOL_TOKENS = 4096


def flags(store: Path) -> tuple[str, ...]:
    return (
        *("--kv-policy", "importance", "--page-size", "16", "--max-total-tokens", str(POOL_TOKENS)),
        *("--kv-importance-store", str(store), "--hicache-ratio", "2", "--skip-tokenizer-init"),
        *("--hicache-storage-prefetch-policy", "wait_complete", "--kv-importance-prewarm", "off"),
    )


def prompt(number: int) -> list[int]:
    return [10 + (number * 37 + index * (number + 3)) % 900 for index in range(400)]


def answers(server: ServerProcess, count: int = 6) -> tuple[list[list[int]], int, int]:
    """Tokens of the answers to some prompts; prompt tokens found in the cache, and of these in storage."""
    replies = [server.generate(prompt(number), max_new_tokens=8, ignore_eos=True) for number in range(count)]
    cached = sum(reply["meta_info"]["cached_tokens"] for reply in replies)
    details = [reply["meta_info"]["cached_tokens_details"] or {} for reply in replies]
    return [reply["output_ids"] for reply in replies], cached, sum(each.get("storage", 0) for each in details)


def call(server: ServerProcess, method: str, path: str, key: str | None, body: Any = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else None
    url = f"{server.base_url}/kv_importance{path}"
    return httpx.request(method, url, headers=headers, json=body, timeout=HANG_SECONDS, trust_env=False)


def pins(server: ServerProcess, key: str | None = None) -> dict[str, bool]:
    """What the server says of its pins: whether they would be there after a restart."""
    listed = call(server, "GET", "/pins", key).raise_for_status().json()["pins"]
    return {each["pin_id"]: each["survives_restart"] for each in listed}


def rows(store: Path) -> set[str]:
    """The pins in the ledger that a server which starts now would open."""
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"file:{store}/ledger.sqlite?mode=ro", uri=True)) as file,
    ):
        return {name for (name,) in file.execute("SELECT pin_id FROM pins")}
    return set()


def remove(store: Path) -> None:
    """With what is in it: a server that writes meanwhile makes a new one, and puts nothing into this."""
    shutil.rmtree(store.rename(store.with_name("removed")))


def pin(server: ServerProcess, number: int, key: str | None = None) -> str:
    body = {"input_ids": prompt(number)[:320]}
    return str(call(server, "POST", "/pin", key, body).raise_for_status().json()["pin_id"])


ROUTES = (
    *(
        ("GET", ""),
        ("GET", "/pins"),
        ("GET", "/tree"),
        ("GET", "/events"),
        ("GET", "/prewarm"),
        ("GET", "/node/1"),
    ),
    *(("POST", "/pin"), ("POST", "/unpin"), ("POST", "/find"), ("POST", "/prewarm"), ("POST", "/importance")),
    *(("GET", "/node/1/prompt"), ("GET", "/prewarm/none"), ("DELETE", "/prewarm/none")),
)


def check_admin_key(server: ServerProcess) -> None:
    """Our routes want the admin key, and no other; generation wants none, and nobody is told the key."""
    assert KEY not in json.dumps(server.get("/server_info"))
    assert "server_args=" in server.log()
    assert KEY not in server.log()
    for method, path in ROUTES:
        body = {} if method == "POST" else None
        for key in (None, "wrong", KEY + "x"):
            assert call(server, method, path, key, body).status_code == 401, (method, path, key)
        assert call(server, method, path, KEY, body).status_code in (200, 400, 404), (method, path)
    for words, code, said in (
        (["--api-key", KEY, "--json"], 0, '"pins"'),
        (["--api-key", "wrong"], 2, "refuses the key: give --api-key or set SGLANG_API_KEY"),
        ([], 2, "refuses the key: give --api-key or set SGLANG_API_KEY"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("SGLANG_API_KEY", raising=False)
            ended, output, error = run(["pin", "list", "--url", server.base_url, *words])
        assert (ended, said in output + error) == (code, True), (words, error)


def test_a_server_whose_directory_is_taken_away(probe_model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with ServerProcess(*flags(store), "--admin-api-key", KEY, model=probe_model) as server:
        expected, cached, _ = answers(server)
        assert cached == 0, "these are the answers of a server that reuses nothing"
        check_admin_key(server)
        held = {pin(server, 0, KEY)}
        wait_until(lambda: pins(server, KEY) == dict.fromkeys(held, True))
        for number, take_away in enumerate((remove, lambda path: path.rename(tmp_path / "elsewhere"))):
            take_away(store)
            held.add(pin(server, number + 1, KEY))

            def told_the_truth() -> bool:
                said = pins(server, KEY)
                kept = {name for name, survives in said.items() if survives}
                assert set(said) == held
                assert kept <= rows(store), "said to survive, and not in the file"
                return kept == held

            wait_until(told_the_truth)
            assert answers(server)[0] == expected
        assert server.log().count("was removed, moved away or replaced") == 2
        assert "Traceback" not in server.log()
        server.kill_launcher()
    with ServerProcess(*flags(store), model=probe_model) as again:
        wait_until(lambda: pins(again) == dict.fromkeys(held, True))
        assert answers(again)[0] == expected


@pytest.mark.nightly
def test_servers_of_two_models_side_by_side_on_one_directory(probe_model: Path, tmp_path: Path) -> None:
    store, other_model = tmp_path / "store", write_random_llama(tmp_path / "model")
    with ServerProcess(*flags(store), model=probe_model) as first:
        expected, cached, _ = answers(first)
        assert cached == 0
        held = pin(first, 0)
        wait_until(lambda: pins(first) == {held: True})
        time.sleep(2)  # of pages, the last are still being written
        with (
            ServerProcess(*flags(store), model=probe_model) as second,
            ServerProcess(*flags(store), model=other_model) as other,
        ):
            wait_until(lambda: pins(second) == {held: True})
            assert pins(other) == {}
            found, _, from_storage = answers(second)
            assert found == expected
            assert from_storage > 0
            theirs, cached, _ = answers(other)
            assert cached == 0, "pages of another model"
            assert theirs != expected
            of_second, of_other = pin(second, 1), pin(other, 2)
            wait_until(
                lambda: pins(second) == {held: True, of_second: True} and pins(other) == {of_other: True}
            )
            remove(store)
            wait_until(lambda: pins(first) == {held: True} and pins(other) == {of_other: True})
            wait_until(lambda: pins(second) == {held: True, of_second: True})
            assert rows(store) == {held, of_second, of_other}
            first.kill_launcher()
            for server, right in ((second, expected), (other, theirs)):
                server.flush_cache()
                assert answers(server)[0] == right
                assert answers(server)[0] == right
            stat = [
                sys.executable,
                "-c",
                "from sgl_importance.cli.main import main; main()",
                "store",
                "stat",
                str(store),
            ]
            facts = json.loads(subprocess.run([*stat, "--json"], capture_output=True, check=True).stdout)
            assert len(facts["models"]) == 2
            for server in (second, other):
                assert "Traceback" not in server.log()
