"""Speculative decoding: the tree takes in what was accepted; the answers are those of one token a step."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sgl_importance.metrics_table import PREFIX

from support.models import write_random_llama
from support.python_path import CHECKS, python_path
from support.servers import ServerProcess
from support.workloads.shared_prefixes import shared_prefixes

pytestmark = pytest.mark.server

PAGE_TOKENS, PREFIX_TOKENS, ANSWER_TOKENS = 16, 96, 16
FLAGS = (
    *("--skip-tokenizer-init", "--context-length", "2048", "--attention-backend", "torch_native"),
    *("--page-size", str(PAGE_TOKENS), "--max-running-requests", "4"),
)
NO_SCORES = "no producer of them has run beside speculative decoding (--speculative-algorithm"
ONE_STEP = (
    *("--speculative-num-steps", "1", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "2"),
)
CHAIN = ("--speculative-ngram-max-bfs-breadth", "1", "--speculative-num-draft-tokens", "4")
TIERS = ("--enable-hierarchical-cache", "--hicache-ratio", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("random-llama"))


@pytest.fixture(scope="module")
def eagle(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of EAGLE's for the model, as a configuration only: its drafts are hardly ever right."""
    folder = tmp_path_factory.mktemp("eagle")
    config = json.loads((model / "config.json").read_text())
    head = {**config, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(head))
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Six prefixes of six pages, each asked about three times, in any order, and all of it twice."""
    return shared_prefixes(6, 3, prefix_tokens=PREFIX_TOKENS) * 2


@pytest.fixture(scope="module")
def answers(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Of stock sglang that reuses nothing and guesses nothing: to the prompts, then to what goes on."""
    with ServerProcess("--kv-policy", "default", "--disable-radix-cache", *FLAGS, model=model) as server:
        return [each["output_ids"] for each in conversation(server, prompts)]


def conversation(server: ServerProcess, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """The answers, and those to each prompt with its answer and a few tokens more."""
    first = [asked(server, prompt) for prompt in prompts]
    goes_on = [[*prompt, *reply["output_ids"], 7, 8, 9] for prompt, reply in zip(prompts, first, strict=True)]
    return [*first, *(asked(server, prompt) for prompt in goes_on)]


def asked(server: ServerProcess, prompt: list[int]) -> dict[str, Any]:
    return server.generate(prompt, max_new_tokens=ANSWER_TOKENS, ignore_eos=True)


def check(
    flags: tuple[str, ...], model: Path, prompts: list[list[int]], answers: list[list[int]], *, guesses: bool
) -> None:
    """Serves with speculation over a pool that is too small."""
    server = ServerProcess(
        *("--kv-policy", "importance", *FLAGS, "--max-total-tokens", "640", *flags),
        model=model,
        env=python_path(CHECKS / "tree_check"),
    )
    with server:
        replies = conversation(server, prompts)
        assert [reply["output_ids"] for reply in replies] == answers
        details = [reply["meta_info"] for reply in replies]
        assert sum(detail["cached_tokens"] for detail in details) > 10 * PREFIX_TOKENS
        steps = [detail["spec_verify_ct"] for detail in details]
        assert all(steps)
        assert (sum(steps) < 0.8 * ANSWER_TOKENS * len(steps)) == guesses
        assert server.metric(f"{PREFIX}evicted_tokens_total", tier="device", reason="least_loss") > 0
        from_host = sum((detail["cached_tokens_details"] or {}).get("host", 0) for detail in details)
        assert (from_host > 0) == ("--enable-hierarchical-cache" in flags)
        assert NO_SCORES in server.log()
        assert server.metric(f"{PREFIX}folds_total") == 0
        accounts = server.get("/kv_importance/why", limit=len(replies))["requests"]
        for account, detail in zip(reversed(accounts), details, strict=True):
            assert sum(account["found_tokens"].values()) == detail["cached_tokens"]
            missed = account["missed_tokens"]
            assert detail["cached_tokens"] + sum(missed.values()) == detail["prompt_tokens"]
        assert {"never_seen", "parted", "evicted"} <= {
            each for account in accounts for each in account["missed_tokens"]
        }
        server.flush_cache()
        assert server.log().count("tree_check: sound with") > 4


@pytest.mark.tested(
    kind="mode",
    name="`--speculative-algorithm EAGLE`, one step",
    mode="predicted reuse only",
    backend="torch_native",
)
def test_eagle(model: Path, eagle: Path, prompts: list[list[int]], answers: list[list[int]]) -> None:
    draft = ("--speculative-draft-model-path", str(eagle), "--speculative-draft-load-format", "dummy")
    flags = ("--speculative-algorithm", "EAGLE", *draft, *ONE_STEP)
    check(flags, model, prompts, answers, guesses=False)


@pytest.mark.nightly
@pytest.mark.tested(
    kind="mode",
    name="`--speculative-algorithm STANDALONE`, one step, with a host tier",
    mode="predicted reuse only",
    backend="torch_native",
)
def test_a_draft_model(model: Path, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """The model guesses for itself: all but what it has not seen is right."""
    flags = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(model), *ONE_STEP)
    check((*flags, *TIERS), model, prompts, answers, guesses=True)


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("tvm_ffi") is None, reason="sglang compiles its n-grams with apache-tvm-ffi")
@pytest.mark.tested(
    kind="mode",
    name="`--speculative-algorithm NGRAM`, a chain of drafts",
    mode="predicted reuse only",
    backend="torch_native",
)
def test_n_grams(model: Path, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """What was asked before is answered as before, and guessed."""
    check(("--speculative-algorithm", "NGRAM", *CHAIN), model, prompts, answers, guesses=True)
