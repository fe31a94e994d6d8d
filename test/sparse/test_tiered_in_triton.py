"""A server whose tiered pages are scanned, moved and read in Triton answers as one with kernels for CPUs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.models import write_random_llama
from support.servers import ServerProcess
from support.tiered import tiered_server

pytest.importorskip("triton")
pytestmark = pytest.mark.server

SPARSE = (
    *("--kv-sparse-selector", "bits", "--kv-sparse-budget", "64", "--kv-sparse-min-context", "64"),
    *("--kv-device-tokens", "480"),
)
SHARED = [100 + 7 * at % 89 for at in range(100)]
PROMPTS = [SHARED + [200 + (at * (number + 3)) % 97 for at in range(20 + 9 * number)] for number in range(3)]
EXACT = {"selector": "all"}


def asked(server: ServerProcess, prompt: list[int], hints: dict[str, Any] | None = None) -> dict[str, Any]:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        "return_logprob": True,
        "kv_hints": {"report": True, **(hints or {})},
    }
    reply: dict[str, Any] = server.post("/generate", body)
    told = reply["meta_info"]
    logprobs = [logprob for logprob, *_ in told["output_token_logprobs"]]
    return {"tokens": reply["output_ids"], "logprobs": logprobs, **told["kv_importance"]["pages"]}


@pytest.mark.tested(
    kind="mode",
    name="tiered pages in Triton's interpreter, chosen by a selector",
    mode="tiered pages",
    backend="triton",
)
def test_answers_and_choices_are_those_of_torch_native(tmp_path: Path) -> None:
    model = write_random_llama(tmp_path / "model")
    with tiered_server(model, *SPARSE) as server:
        expected = [asked(server, prompt) for prompt in PROMPTS]
        exact = asked(server, PROMPTS[0], EXACT)
        traffic = server.get("/kv_importance?limit=1")["pages"]
    assert sum(reply["selected"] for reply in expected) < sum(reply["candidates"] for reply in expected)
    assert exact["tokens"] != expected[0]["tokens"], "the budget left nothing out that matters"
    for reply in (exact, *expected):
        reply["logprobs"] = pytest.approx(reply["logprobs"], abs=1e-4)
    triton = tiered_server(
        model, *SPARSE, "--attention-backend", "triton", env={"TRITON_INTERPRET": "1"}, imports_anew=True
    )
    with triton as server:
        assert [asked(server, prompt) for prompt in PROMPTS[:1]] == expected[:1]
        assert asked(server, PROMPTS[0], EXACT) == exact
        # What is resident by now, and who else is in the step, changes nothing.
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(lambda prompt: asked(server, prompt), PROMPTS)) == expected
        seen = server.get("/kv_importance?limit=1")["pages"]
    tables = seen["device_bytes"].pop("tables")
    assert tables > traffic["device_bytes"].pop("tables")  # with the order in which kernels give slots
    assert seen["device_bytes"] == traffic["device_bytes"]
    assert 0 < seen["loaded"] < seen["read"]
