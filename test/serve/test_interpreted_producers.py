"""Real servers whose page scores come from Triton kernels, in the interpreter: what they fold is as defined.

The expected scores are made of the attention that transformers computes for the same tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sgl_importance.observe.trace.reader import open_trace
from sgl_importance.observe.trace.records import Fold
from sgl_importance_lab.conformance.page_scores import PageScores, combine_layers, pages_of

from support.config_file import config_flags
from support.models import SMALL_LLAMA, write_random_llama
from support.python_path import CHECKS, python_path
from support.recordings import wait_until_recorded
from support.servers import ServerProcess

pytestmark = pytest.mark.server

PAGE, WINDOW, SINKS, LOCAL = 16, 6, 4, 8
ANSWER_TOKENS = 4  # of its steps the first and the third are observed; one that runs ahead of the end is not
FLAGS = (
    *("--kv-policy", "importance", "--attention-backend", "triton", "--page-size", str(PAGE)),
    *("--skip-tokenizer-init", "--max-running-requests", "2", "--context-length", "128"),
    *("--max-total-tokens", "512"),
    *config_flags(
        signal={"window": WINDOW, "interval": 2, "sink_tokens": SINKS, "local_tokens": LOCAL},
        trace={"detail": "folds"},
    ),
)
FIRST = [*range(100, 144)]
SECOND = [*FIRST[:32], *range(300, 311)]  # its first two pages are in the cache


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(
        tmp_path_factory.mktemp("random-llama"), shape={**SMALL_LLAMA, "num_hidden_layers": 2}
    )


def attention(model: Path, tokens: list[int]) -> list[torch.Tensor]:
    """Probabilities of each layer, [heads, tokens, tokens]."""
    from transformers import LlamaForCausalLM

    loaded = LlamaForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        layers = loaded(torch.tensor([tokens]), output_attentions=True).attentions
    return [layer[0] for layer in layers]


def definition(layers: list[torch.Tensor], positions: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Body mass over these query tokens, summing to 1, and peak; by page."""
    seen = max(positions) + 1
    token = torch.arange(seen)
    rows = torch.tensor(positions)
    in_body = (token >= SINKS) & (token < rows[:, None] + 1 - LOCAL)
    scores = []
    for layer in layers:
        probabilities = layer[:, rows, :seen]
        by_page = pages_of(probabilities, PAGE)
        body = pages_of(probabilities.mean(dim=0) * in_body, PAGE)
        scores.append(PageScores(mass=by_page.mean(dim=0), peak=by_page.amax(dim=0), body=body))
    combined = combine_layers(scores)
    body_mass = combined.body.sum(dim=0)
    return (body_mass / body_mass.sum()).numpy(), combined.peak.amax(dim=0).numpy()


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            source,
            marks=pytest.mark.tested(name=f"`--kv-importance-source {source}`, in Triton's interpreter"),
        )
        for source in ("triton", "qk_probe")
    ],
)
@pytest.mark.tested(kind="mode", mode="page scores from attention", backend="triton")
def test_prefill_windows_and_decode_steps_are_folded_as_defined(
    model: Path, tmp_path: Path, source: str
) -> None:
    server = ServerProcess(
        *FLAGS,
        *("--kv-importance-source", source, "--kv-importance-trace", str(tmp_path)),
        model=model,
        env={"TRITON_INTERPRET": "1", **python_path(CHECKS / "untried_producers")},
        imports_anew=True,  # Triton reads it while it is imported
    )
    with server:
        replies = [
            server.generate(prompt, max_new_tokens=ANSWER_TOKENS, ignore_eos=True)
            for prompt in (FIRST, SECOND)
        ]
        assert [reply["meta_info"]["cached_tokens"] for reply in replies] == [0, 32]
        assert "HAS HARDLY RUN ON A GPU" in server.log()
        nodes = server.get("/kv_importance", limit=100)["nodes"]
        assert sum(node["queries"] for node in nodes) > 0
        wait_until_recorded(tmp_path, [reply["meta_info"]["id"] for reply in replies])
    *_, prefill_1, decode_1, prefill_2, decode_2 = (
        record for record in open_trace(tmp_path) if isinstance(record, Fold)
    )
    for prompt, reply, folds in (
        (FIRST, replies[0], (prefill_1, decode_1)),
        (SECOND, replies[1], (prefill_2, decode_2)),
    ):
        layers = attention(model, prompt + reply["output_ids"])
        length = len(prompt)
        observed = ([*range(length - WINDOW, length)], [length, length + 2])
        for folded, positions in zip(folds, observed, strict=True):
            body, peak = definition(layers, positions)
            assert len(folded.body) == len(body)
            np.testing.assert_allclose(folded.body, body, atol=2e-4)
            np.testing.assert_allclose(folded.peak, peak, atol=2e-4)
