"""Each family of models on a real server: stock's tokens, evictions by the policy, a sound tree, scores."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sgl_importance.metrics_table import PREFIX
from sgl_importance.observe.trace.reader import open_trace
from sgl_importance.observe.trace.records import Step

from support.config_file import config_flags
from support.families import FAMILIES, VOCABULARY, Family, write_random_model
from support.python_path import CHECKS, python_path
from support.reference_attention import Planted, planted
from support.servers import ServerProcess
from support.waiting import wait_until

pytestmark = pytest.mark.server

EVERY_RUN = ("Qwen3",)
"""The others are nightly."""
PAGE_TOKENS = 16
FLAGS = (
    *("--skip-tokenizer-init", "--page-size", str(PAGE_TOKENS), "--max-running-requests", "4"),
    *("--context-length", "2048"),
)
POOL_TOKENS = 512
# Upstream keeps the inputs of convolutions in bfloat16, whatever the model is: what goes on from a state is
# rounded there, what is computed at once is not.
EXACT_STATES = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
EAGER = {**python_path(CHECKS / "eager_torch"), **EXACT_STATES}
PLUGINS = {**python_path(CHECKS / "tree_check", CHECKS / "eager_torch"), **EXACT_STATES}
PREFIX_TOKENS, ANSWER_TOKENS = 96, 4
WINDOW = 8
PLANTED_TOKENS = 151  # as many as no other request has
STRETCH = slice(2 * PAGE_TOKENS, 3 * PAGE_TOKENS)

Stock = Callable[[Family], tuple[Path, list[list[int]], list[list[int]]]]


def families() -> list:
    """Parameters of a test: the families of every run, the others marked as nightly."""
    return [
        pytest.param(
            family,
            id=family.name,
            marks=(
                pytest.mark.tested(kind="family", name=family.name, backend="torch_native"),
                *(() if family.name in EVERY_RUN else (pytest.mark.nightly,)),
            ),
        )
        for family in FAMILIES
    ]


def ways() -> list:
    """Parameters of a test: the ways that a family is served in, the first in every run."""
    auto, none = ("--kv-importance-source", "auto"), ("--kv-importance-source", "none")
    tiers = ("--enable-hierarchical-cache", "--hicache-ratio", "4")
    chosen = {
        "scores": ("page scores from attention", auto),
        "reuse": ("predicted reuse only", none),
        "host": ("page scores, and a host tier", (*auto, *tiers)),
    }
    return [
        pytest.param(
            flags,
            id=name,
            marks=(
                pytest.mark.tested(mode=mode),
                *(() if name == "scores" else (pytest.mark.nightly,)),
            ),
        )
        for name, (mode, flags) in chosen.items()
    ]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Six prefixes of six pages, each asked about four times, in any order."""
    rng = random.Random(0)
    prefixes = [rng.choices(range(10, VOCABULARY), k=PREFIX_TOKENS) for _ in range(6)]
    asked = [prefix + rng.choices(range(10, VOCABULARY), k=20) for prefix in prefixes for _ in range(4)]
    return rng.sample(asked, len(asked))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]) -> Stock:
    """A family's checkpoint, prompts, and the answers of stock sglang that reuses nothing; made once."""
    made: dict[str, tuple[Path, list[list[int]], list[list[int]]]] = {}

    def answers(family: Family) -> tuple[Path, list[list[int]], list[list[int]]]:
        if family.name not in made:
            model = write_random_model(tmp_path_factory.mktemp(family.model_type), family)
            flags = ("--kv-policy", "default", "--disable-radix-cache", *FLAGS, *family.flags)
            with ServerProcess(*flags, model=model, env=EAGER) as server:
                if family.states:
                    made[family.name] = model, *conversations(server)
                else:
                    said = [asked(server, prompt)["output_ids"] for prompt in prompts]
                    made[family.name] = model, prompts, said
        return made[family.name]

    return answers


def conversations(server: ServerProcess) -> tuple[list[list[int]], list[list[int]]]:
    """Six conversations of four turns: a state is found again only where a request goes on from its end."""
    rng = random.Random(0)
    texts = [rng.choices(range(10, VOCABULARY), k=PREFIX_TOKENS) for _ in range(6)]
    prompts, answers = [], []
    for _ in range(4):
        for speaker in rng.sample(range(6), 6):
            prompts.append(texts[speaker])
            answers.append(asked(server, prompts[-1])["output_ids"])
            texts[speaker] = prompts[-1] + answers[-1] + rng.choices(range(10, VOCABULARY), k=20)
    return prompts, answers


def asked(server: ServerProcess, prompt: list[int]) -> dict:
    return server.generate(prompt, max_new_tokens=ANSWER_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("way", ways())
def test_a_family_is_served(family: Family, way: tuple[str, ...], stock: Stock, tmp_path: Path) -> None:
    model, prompts, answers = stock(family)
    assert len({tuple(answer) for answer in answers}) > len(answers) / 2, "the model ignores its prompt"
    has_scores = "none" not in way
    recording = ("--kv-importance-trace", str(tmp_path))
    detail = {"trace": {"detail": "steps"}} if has_scores else {}
    server = ServerProcess(
        *("--kv-policy", "importance", *way, *FLAGS, *family.flags),
        *("--max-total-tokens", str(POOL_TOKENS)),
        *config_flags(signal={"window": WINDOW}, **detail),
        *(recording if has_scores else ()),
        model=model,
        env=PLUGINS,
    )
    prompts_planted: tuple[Planted, ...] = ()
    with server:
        middle = len(prompts) // 2
        replies = [asked(server, prompt) for prompt in prompts[:middle]]
        with ThreadPoolExecutor(3) as pool:
            replies += pool.map(lambda prompt: asked(server, prompt), prompts[middle:])
        assert [reply["output_ids"] for reply in replies] == answers
        check_tiers(
            server,
            replies,
            has_host="--hicache-ratio" in way,
            upstream_makes_room=family.second_pool and not family.states,
        )
        check_scores(server, wanted=has_scores)
        if has_scores:
            prompts_planted = ask_planted(server, model)
            wait_until(lambda: len(planted_steps(tmp_path)) == len(prompts_planted))
        server.flush_cache()
        assert re.search(r"tree_check: sound with [1-9]\d* tokens", server.log())
    if has_scores:
        check_planted(prompts_planted, tmp_path, page_tokens=1 if family.states else PAGE_TOKENS)


def check_tiers(
    server: ServerProcess, replies: list[dict], *, has_host: bool, upstream_makes_room: bool
) -> None:
    """Each tier gave tokens back, and who had a leaf evicted is told."""
    details = [reply["meta_info"]["cached_tokens_details"] or {} for reply in replies]
    assert sum(detail.get("device", 0) for detail in details) >= 2 * PREFIX_TOKENS
    assert (sum(detail.get("host", 0) for detail in details) > 0) == has_host
    evicted = f"{PREFIX}evicted_tokens_total"
    assert server.metric(evicted, tier="device", reason="least_loss") > 0
    # Room for sliding windows is made by upstream, which takes whole leaves too.
    assert (server.metric(evicted, tier="device", reason="stock_order") > 0) == upstream_makes_room


def check_scores(server: ServerProcess, *, wanted: bool) -> None:
    nodes = server.get("/kv_importance", limit=1000)["nodes"]
    assert (server.metric(f"{PREFIX}folds_total") > 0) == wanted
    assert any(node["queries"] > 0 for node in nodes) == wanted


def ask_planted(server: ServerProcess, model: Path) -> tuple[Planted, ...]:
    """Asks what attends little and much to one page, as transformers has it of the observed layers."""
    layers = re.search(r"Page scores from layers (\[[\d, ]+\])", server.log())
    assert layers is not None
    pair = planted(
        model,
        json.loads(layers[1]),
        tokens=PLANTED_TOKENS,
        stretch=STRETCH,
        window=WINDOW,
        seed=0,
    )
    for each in pair:
        asked(server, each.prompt)
    return pair


def planted_steps(trace: Path) -> list[Step]:
    """The prefills of what was planted, as far as they are written."""
    records = [record for record in open_trace(trace) if isinstance(record, Step)]
    return [step for step in records if (step.phase, step.seq_len) == ("prefill", PLANTED_TOKENS)]


def check_planted(prompts: tuple[Planted, ...], trace: Path, *, page_tokens: int) -> None:
    """Each page has the share of attention that transformers gives it: it moves with what was planted."""
    steps = planted_steps(trace)
    assert len(steps) == len(prompts)
    pages = range(0, PLANTED_TOKENS, page_tokens)
    for step, each in zip(steps, prompts, strict=True):
        assert step.query_tokens == WINDOW
        np.testing.assert_allclose(step.mass.astype(float), np.add.reduceat(each.rows, pages), atol=2e-3)
    of_stretch = slice(STRETCH.start // page_tokens, STRETCH.stop // page_tokens)
    little, much = (float(step.mass[of_stretch].astype(float).sum()) for step in steps)
    assert much > 2 * little
