"""Servers that stop and start again on one ledger."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sgl_importance_lab.probe.tasks import make_document
from sgl_importance_lab.probe.tokenizer import encode

from support.kept import wait_until_kept
from support.prewarms import PATH, ended
from support.servers import ServerProcess
from support.waiting import wait_until

pytestmark = pytest.mark.server

POOL_TOKENS = 8192


def prompts() -> list[list[int]]:
    documents = [make_document(400, seed) for seed in (100, 101)]
    return [encode(each.messages(name)) for each in documents for name in list(each.records)[:3]]


PINS = {
    "unsalted": {"input_ids": prompts()[0][:400], "ttl_seconds": 600},
    "salted": {"input_ids": [900 - number % 50 for number in range(320)], "cache_salt": "kept"},
    "never asked for": {"input_ids": [800 - number % 50 for number in range(160)], "cache_salt": "kept"},
}


def flags(folder: Path) -> tuple[str, ...]:
    return (
        *("--kv-policy", "importance", "--page-size", "16", "--max-total-tokens", str(POOL_TOKENS)),
        *("--kv-importance-store", str(folder), "--hicache-ratio", "2"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
    )


@pytest.fixture(scope="module")
def before(
    probe_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict], dict, dict]:
    """Folder, answers, tree and pins of a warm server; it is killed as a crash would."""
    folder = tmp_path_factory.mktemp("store")
    with ServerProcess(*flags(folder), model=probe_model) as server:
        for prompt in prompts():
            server.generate(prompt, max_new_tokens=4)
        warm = [server.generate(prompt, max_new_tokens=4) for prompt in prompts()]
        tree = server.get("/kv_importance", limit=1000)
        for body in PINS.values():
            server.post("/kv_importance/pin", body)
        ended = server.post("/kv_importance/pin", PINS["unsalted"])["pin_id"]
        server.post("/kv_importance/unpin", {"pin_id": ended})
        wait_until_kept(server)
        wait_until(lambda: all(pin["survives_restart"] for pin in server.get("/kv_importance/pins")["pins"]))
        pins = server.get("/kv_importance/pins")
        server.kill_launcher()
    return folder, warm, tree, pins


@pytest.fixture(scope="module")
def after(before: tuple[Path, list[dict], dict, dict], probe_model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(*flags(before[0]), "--kv-importance-prewarm", "idle", model=probe_model) as server:
        yield server


def test_the_first_requests_find_what_they_would_have_found(before, after: ServerProcess):
    _, warm, tree, _ = before
    job = ended(after)
    assert (job["state"], job["detail"], job["refused_tokens"]) == ("done", "", 0)
    assert job["done_tokens"] == job["total_tokens"] > 700
    assert sum(job["hit_tokens"].values()) + job["computed_tokens"] == job["done_tokens"]
    assert job["hit_tokens"]["storage"] > 0
    # Nobody has asked for anything yet but the server's own two start-up requests.
    clock = after.get("/kv_importance", limit=1)["clock"]
    assert tree["clock"] <= clock <= tree["clock"] + 8
    for prompt, expected in zip(prompts(), warm, strict=True):
        answer = after.generate(prompt, max_new_tokens=4)
        assert answer["output_ids"] == expected["output_ids"]
        assert answer["meta_info"]["cached_tokens"] == expected["meta_info"]["cached_tokens"] == 400


def test_what_was_learnt_is_there_again(before, after: ServerProcess):
    """One more visit each; scores are those of before and of that visit."""
    _, _, tree, _ = before

    def long_nodes(nodes: list[dict]) -> dict[tuple[int, int], dict]:
        return {(node["depth_tokens"], node["tokens"]): node for node in nodes if node["tokens"] > 100}

    found = long_nodes(after.get("/kv_importance", limit=1000)["nodes"])
    compared = 0
    for place, node in long_nodes(tree["nodes"]).items():
        if place in found:
            assert found[place]["accesses"] >= node["accesses"] > 0
            assert found[place]["queries"] >= node["queries"] > 0
            assert found[place]["peak"] == pytest.approx(node["peak"], abs=0.3)
            compared += 1
    assert compared > 0


def test_pins_hold_again_for_what_is_left_of_their_time(before, after: ServerProcess):
    *_, held = before
    # Where it takes long to look whether the ledger is still there, a server says that none survives.
    wait_until(lambda: all(pin["survives_restart"] for pin in after.get("/kv_importance/pins")["pins"]))
    restored = after.get("/kv_importance/pins")["pins"]
    for name in ("pin_id", "tokens", "cache_salt", "granted_tokens", "source"):
        assert [pin[name] for pin in restored] == [pin[name] for pin in held["pins"]], name
    assert [pin["cache_salt"] for pin in restored] == [None, "kept", "kept"]
    elapsed = [pin["expires_in_seconds"] for pin in restored]
    assert 0 < elapsed[0] < held["pins"][0]["expires_in_seconds"] - 1
    assert elapsed[1:] == [None, None]
    events = after.get("/kv_importance/events", limit=4096)["events"]
    told = [(each["kind"], each["reason"], each["pin_id"]) for each in events if each["pin_id"]]
    assert told == [("pin", "restored", pin["pin_id"]) for pin in restored]


def test_a_restored_pin_takes_hold_of_its_salt_s_text_when_that_returns(after: ServerProcess):
    def resident() -> list[int]:
        return [pin["resident_tokens"] for pin in after.get("/kv_importance/pins")["pins"]]

    ended(after)
    assert resident() == [400, 0, 0], "the pre-warm has brought in the first, nobody ever the others"
    body = {"input_ids": PINS["salted"]["input_ids"], "sampling_params": {"max_new_tokens": 1}}
    after.post("/generate", body)
    assert resident() == [400, 0, 0], "another namespace"
    after.post("/generate", {**body, "cache_salt": "kept"})
    assert resident() == [400, 320, 0]
    pinned = [node for node in after.get("/kv_importance", limit=1000)["nodes"] if node["pinned"]]
    assert sum(node["tokens"] for node in pinned) == 720
    last = after.get("/kv_importance/pins")["pins"][-1]
    after.post("/kv_importance/unpin", {"pin_id": last["pin_id"]})
    # Pages of the last request may be written to storage meanwhile: events as well.
    events = after.get("/kv_importance/events", limit=4096)["events"]
    told = [(each["reason"], each["pin_id"], each["tokens"]) for each in events if each["kind"] == "unpin"]
    assert told == [("unpinned", last["pin_id"], last["tokens"])]


def test_a_prompt_can_be_named_as_text_messages_or_tokens(after: ServerProcess):
    document = make_document(500, 77)
    messages = document.messages(next(iter(document.records)))
    chat = after.post(PATH, {"messages": messages})
    assert ended(after, chat["job_id"])["done_tokens"] == chat["tokens"] > 400
    used = after.chat(messages, max_tokens=2)["usage"]
    assert used["prompt_tokens"] == chat["tokens"]
    assert used["prompt_tokens_details"]["cached_tokens"] == (chat["tokens"] - 1) // 16 * 16
    tokens = [7 + number % 50 for number in range(321)]
    named = after.post(PATH, {"input_ids": tokens, "cache_salt": "tenant"})
    assert ended(after, named["job_id"])["computed_tokens"] == named["tokens"] == 321
    assert after.generate(tokens, max_new_tokens=1)["meta_info"]["cached_tokens"] == 0
    salted = {"input_ids": tokens, "cache_salt": "tenant", "sampling_params": {"max_new_tokens": 1}}
    assert after.post("/generate", salted)["meta_info"]["cached_tokens"] == 320


def test_a_prewarm_is_no_request(after: ServerProcess):
    clock = after.get("/kv_importance", limit=1)["clock"]
    requests = after.metric("sglang:kv_importance_requests_total")
    ended(after, after.post(PATH, {"input_ids": list(range(10, 200))})["job_id"])
    ended(after, after.post(PATH)["job_id"])
    assert after.get("/kv_importance", limit=1)["clock"] == clock
    assert after.metric("sglang:kv_importance_requests_total") == requests


def test_a_job_can_be_cancelled(after: ServerProcess):
    tokens = [11 + (number * number) % 900 for number in range(1000)]
    job_id = after.post(PATH, {"input_ids": tokens})["job_id"]
    cancelled = after._client.delete(f"{PATH}/{job_id}").raise_for_status().json()
    assert cancelled["state"] in ("cancelled", "done")
    assert after.get(f"{PATH}/{job_id}")["state"] == cancelled["state"]
    assert after.generate([1, 2, 3], max_new_tokens=1)["meta_info"]["completion_tokens"] == 1


def test_an_idle_server_fills_the_room_that_it_has(after: ServerProcess):
    def idle_jobs() -> dict[str, dict]:
        return {job["job_id"]: job for job in after.get(PATH)["jobs"] if job["origin"] == "idle"}

    before = idle_jobs()
    after.flush_cache()
    # Each is begun behind a request of a user; that of the last ones may have begun before the flush.
    after.generate([1, 2, 3], max_new_tokens=1)

    def has_filled() -> bool:
        new = [job for job_id, job in idle_jobs().items() if job_id not in before]
        return any(job["state"] != "running" and job["done_tokens"] >= 700 for job in new)

    wait_until(has_filled)
    assert after.generate(prompts()[0], max_new_tokens=1)["meta_info"]["cached_tokens"] == 400


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_an_unknown_job_is_not_found(after: ServerProcess, method: str):
    answer = after._client.request(method, f"{PATH}/nobody")
    assert answer.status_code == 404
    assert "job_id" in answer.text


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"max_seconds": 0}, "max_seconds"),
        ({"cache_salt": "a"}, "cache_salt"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"seconds": 3}, "seconds"),
    ],
)
def test_a_bad_field_is_named(after: ServerProcess, body: dict, field: str):
    with pytest.raises(httpx.HTTPStatusError) as failure:
        after.post(PATH, body)
    assert failure.value.response.status_code == 400
    assert field in failure.value.response.text
