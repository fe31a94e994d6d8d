"""Stock sglang on a CPU: radix cache, host tier and file tier, each answering with the same tokens."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from support.servers import ServerProcess

pytestmark = pytest.mark.server

# The device tier holds 4 prompts, the host tier 8, the file tier all of them.
POOL_TOKENS, PROMPTS, PROMPT_TOKENS = 2048, 14, 480
IN_DEVICE, IN_HOST, IN_STORAGE = PROMPTS - 1, PROMPTS - 6, 0
COMPUTED = "sglang:realtime_tokens_total"
QUIET_SECONDS, WRITE_SECONDS = 1.0, 120.0


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small Llama with random weights and no tokenizer: nothing here needs a skill."""
    import sglang  # noqa: F401  # first: with it come the shims, and transformers needs one of them
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.1,  # large enough that the context decides what comes out
        eos_token_id=None,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("random-llama")
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    return random.Random(seed).choices(range(10, 1000), k=tokens)


def server(model: Path, page_size: int, store: Path) -> ServerProcess:
    return ServerProcess(
        *("--page-size", str(page_size), "--max-total-tokens", str(POOL_TOKENS)),
        *("--skip-tokenizer-init", "--enable-hierarchical-cache", "--hicache-ratio", "2"),
        *("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"),
        model=model,
        store=store,
    )


def ask(process: ServerProcess, tokens: list[int]) -> tuple[list[int], dict[str, int]]:
    """Output tokens, and cached tokens by the tier that they came from."""
    answer = process.generate(tokens, max_new_tokens=8, ignore_eos=True)
    details = answer["meta_info"]["cached_tokens_details"] or {}
    hits = {tier: details.get(tier, 0) for tier in ("device", "host", "storage")}
    assert sum(hits.values()) == answer["meta_info"]["cached_tokens"]
    return answer["output_ids"], hits


def wait_until_written(store: Path, pages: int) -> None:
    """Until the file tier has as many pages, and has had nothing new for a moment."""
    deadline = time.monotonic() + WRITE_SECONDS
    count, since = -1, time.monotonic()
    while count < pages or time.monotonic() - since < QUIET_SECONDS:
        assert time.monotonic() < deadline, f"{count} of {pages} pages after {WRITE_SECONDS:.0f} s"
        time.sleep(0.1)
        if (found := sum(1 for _ in store.iterdir())) != count:
            count, since = found, time.monotonic()


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_tier_answers_with_the_same_tokens(random_model: Path, page_size: int, tmp_path: Path) -> None:
    whole_pages = (PROMPT_TOKENS - 1) // page_size * page_size
    with server(random_model, page_size, tmp_path) as process:
        first = [ask(process, prompt(seed)) for seed in range(PROMPTS)]
        assert len({tuple(tokens) for tokens, _ in first}) == PROMPTS, "the model ignores its prompt"
        assert all(sum(hits.values()) <= page_size for _, hits in first), "nothing was asked before"
        # Of two prompts the first page may be the same.
        wait_until_written(tmp_path, PROMPTS * (whole_pages // page_size - 1))

        for seed, tier in ((IN_DEVICE, "device"), (IN_HOST, "host"), (IN_STORAGE, "storage")):
            tokens, hits = ask(process, prompt(seed))
            assert hits[tier] >= whole_pages - page_size, (tier, hits)
            assert tokens == first[seed][0], tier

        if page_size == 16:
            assert process.shut_down() == 0
            restarted = server(random_model, page_size, tmp_path)
            # The file tier tells models apart by the served name.
            restarted.command = [
                process.name if word == restarted.name else word for word in restarted.command
            ]
            restarted.name = process.name
            with restarted:
                for seed in (0, PROMPTS // 2, PROMPTS - 1):
                    tokens, hits = ask(restarted, prompt(seed))
                    assert hits["storage"] == whole_pages, hits
                    assert tokens == first[seed][0]
                assert ask(restarted, prompt(PROMPTS))[1]["storage"] == 0, "a prompt never seen before"


def test_a_cached_prefix_is_not_computed_again(random_model: Path, tmp_path: Path) -> None:
    """By the server's own count; that attention computes no cached rows, test_extend_attention.py shows."""
    tokens = prompt(1000, 1008)
    computed = []
    with server(random_model, 16, tmp_path) as process:
        for _ in range(2):
            before = process.metric(COMPUTED, mode="prefill_compute")
            process.generate(tokens, max_new_tokens=1)
            computed.append(process.metric(COMPUTED, mode="prefill_compute") - before)
    assert computed == [1008, 16]
