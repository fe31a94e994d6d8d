"""Real servers without page scores: stock's tokens, evictions by predicted reuse, pins, ledger, store."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sgl_importance.metrics_table import PREFIX

from support.kept import wait_until_kept
from support.models import write_random_llama
from support.prewarms import ended
from support.servers import ServerProcess

pytestmark = pytest.mark.server

POOL = ("--skip-tokenizer-init", "--page-size", "16", "--max-running-requests", "4")
NO_SCORES = "No page scores (--kv-importance-source none)"
ANSWER_TOKENS = 3  # each takes two seconds in Triton's interpreter


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("random-llama"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Six prefixes of four pages, each asked about four times, in any order."""
    rng = random.Random(0)
    prefixes = [rng.choices(range(10, 1000), k=64) for _ in range(6)]
    asked = [prefix + rng.choices(range(10, 1000), k=20) for prefix in prefixes for _ in range(4)]
    return rng.sample(asked, len(asked))


@pytest.fixture(scope="module")
def answers(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Of stock sglang that reuses nothing."""
    flags = ("--kv-policy", "default", "--disable-radix-cache", *POOL)
    with ServerProcess(*flags, "--attention-backend", "torch_native", model=model) as server:
        return [asked(server, prompt)["output_ids"] for prompt in prompts]


def asked(server: ServerProcess, prompt: list[int]) -> dict:
    return server.generate(prompt, max_new_tokens=ANSWER_TOKENS, ignore_eos=True)


def check_no_scores(server: ServerProcess) -> None:
    """Nothing was observed, the policy decided all the same."""
    assert NO_SCORES in server.log()
    assert "Page scores from layers" not in server.log()
    assert server.metric(f"{PREFIX}folds_total") == 0
    assert all(node["queries"] == 0 for node in server.get("/kv_importance", limit=1000)["nodes"])


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(policy, marks=pytest.mark.tested(name=f"`--kv-policy {policy}`"))
        for policy in ("observe", "importance")
    ],
)
@pytest.mark.tested(kind="mode", mode="predicted reuse only", backend="torch_native")
def test_torch_native_left_alone(
    model: Path, prompts: list[list[int]], answers: list[list[int]], policy: str
) -> None:
    flags = ("--kv-policy", policy, "--kv-importance-source", "none", "--max-total-tokens", "320", *POOL)
    with ServerProcess(*flags, "--attention-backend", "torch_native", model=model) as server:
        with ThreadPoolExecutor(3) as pool:
            replies = list(pool.map(lambda prompt: asked(server, prompt), prompts))
        assert [reply["output_ids"] for reply in replies] == answers
        assert sum(reply["meta_info"]["cached_tokens"] for reply in replies) > 0
        assert server.metric(f"{PREFIX}evicted_tokens_total", tier="device") > 0
        check_no_scores(server)


@pytest.mark.tested(
    kind="mode",
    name="pins, ledger, pre-warm and verified store over a restart",
    mode="predicted reuse only",
    backend="torch_native",
)
def test_pins_ledger_prewarm_and_store_need_no_scores(model: Path, tmp_path: Path) -> None:
    flags = (
        *("--kv-policy", "importance", "--kv-importance-source", "none", *POOL),
        *("--attention-backend", "torch_native", "--max-total-tokens", "1024", "--hicache-ratio", "2"),
        *("--kv-importance-store", str(tmp_path), "--hicache-storage-prefetch-policy", "wait_complete"),
    )
    rng = random.Random(1)
    # Upstream looks for no less than 256 tokens in storage.
    documents = [rng.choices(range(10, 1000), k=330) for _ in range(6)]
    with ServerProcess(*flags, model=model) as server:
        pin = server.post("/kv_importance/pin", {"input_ids": documents[0][:160]})
        answers = [asked(server, document)["output_ids"] for document in documents]
        assert [asked(server, document)["output_ids"] for document in documents] == answers
        assert server.metric(f"{PREFIX}evicted_tokens_total", tier="device") > 0
        (held,) = server.get("/kv_importance/pins")["pins"]
        assert (held["pin_id"], held["resident_tokens"]) == (pin["pin_id"], 160)
        check_no_scores(server)
        wait_until_kept(server)
        server.kill_launcher()
    with ServerProcess(*flags, model=model) as server:
        job = ended(server)
        assert (job["origin"], job["state"], job["refused_tokens"]) == ("start", "done", 0)
        assert job["hit_tokens"]["storage"] > 0
        (restored,) = server.get("/kv_importance/pins")["pins"]
        assert restored["tokens"] == 160
        reply = asked(server, documents[0])
        assert reply["output_ids"] == answers[0]
        assert reply["meta_info"]["cached_tokens"] >= 160
        check_no_scores(server)


@pytest.mark.tested(
    kind="mode",
    name="upstream's Triton attention, in Triton's interpreter",
    mode="predicted reuse only",
    backend="triton",
)
def test_upstreams_triton_attention(model: Path, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """The kernels that a GPU would run, in Triton's interpreter; ``auto`` finds no producer that has run."""
    flags = (*("--kv-policy", "importance", "--max-total-tokens", "192", *POOL), "--context-length", "128")
    server = ServerProcess(
        *(*flags, "--attention-backend", "triton"),
        model=model,
        env={"TRITON_INTERPRET": "1"},
        imports_anew=True,  # Triton reads it while it is imported
    )
    first = prompts[0]
    again = next(prompt for prompt in prompts[1:] if prompt[:64] == first[:64])
    others = [prompt for prompt in prompts if prompt[:64] != first[:64]][:2]
    with server:
        sent = [first, again, *others]
        replies = [asked(server, prompt) for prompt in sent]
        assert [reply["output_ids"] for reply in replies] == [answers[prompts.index(each)] for each in sent]
        assert [reply["meta_info"]["cached_tokens"] for reply in replies] == [0, 64, 0, 0]
        assert server.metric(f"{PREFIX}evicted_tokens_total", tier="device") > 0
        assert "no producer of them has run beside attention backend triton on cpu" in server.log()
        check_no_scores(server)
