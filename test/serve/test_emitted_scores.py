"""What a server learns does not depend on when the scores of a pass are computed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.config_file import config_flags
from support.servers import ServerProcess

pytestmark = pytest.mark.server

FLAGS = ("--kv-policy", "importance", "--page-size", "4", "--max-total-tokens", "8192")
SIGNAL = {"sink_tokens": 0, "local_tokens": 0}
# Prompts end where a page does, and no answer fills one: the moment of a fold decides about such pages.
SHARED = [*range(100, 108), *range(300, 312)]
PROMPTS = [SHARED[:length] for length in (8, 20, 4, 12, 20)]
# Also in batches, one of which is shorter than what is observed of the other.
BATCHES = [[[*range(400, 460)], [*range(500, 504)]], [SHARED, [*range(600, 608)], [*range(700, 732)]]]
LEARNT = ("depth_tokens", "tokens", "body_mass", "peak", "self_mass", "cross_mass", "queries")


def _learnt(server: ServerProcess) -> list[dict[str, Any]]:
    server.flush_cache()  # of what was asked to see whether it is ready
    for prompt in PROMPTS:
        server.generate(prompt, max_new_tokens=3)
    sampling = {"temperature": 0, "max_new_tokens": 3}
    for batch in BATCHES:
        server.post("/generate", {"input_ids": batch, "sampling_params": sampling})
    nodes = server.get("/kv_importance", limit=1000)["nodes"]
    described = [{name: node[name] for name in LEARNT} for node in nodes]
    return sorted(described, key=lambda node: [round(node[name], 3) for name in LEARNT])


def test_scores_computed_behind_the_answer_teach_the_same(probe_model: Path, tmp_path: Path) -> None:
    # Where steps are recorded, scores are computed at once.
    at_once_options = config_flags(signal=SIGNAL, trace={"detail": "steps"})
    at_once_flags = ("--kv-importance-trace", str(tmp_path), *at_once_options)
    with ExitStack() as stack, ThreadPoolExecutor() as starting:
        servers = [
            ServerProcess(*FLAGS, *flags, model=probe_model)
            for flags in (config_flags(signal=SIGNAL), at_once_flags)
        ]
        later, at_once = starting.map(stack.enter_context, servers)
        got, expected = _learnt(later), _learnt(at_once)
    assert len(expected) > 5
    assert sum(node["queries"] for node in expected) > 0
    assert got == [pytest.approx(node, rel=1e-4, abs=1e-6) for node in expected]
