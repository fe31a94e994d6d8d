"""lm-evaluation-harness itself against a real server: one RULER task, 20 prompts of 1,024 tokens, twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sgl_importance_lab.bench.cli import app

from support.served import script_server

pytestmark = [pytest.mark.server, pytest.mark.nightly]  # a server, and 0.9 GB for the harness at first

HARNESS = Path(__file__).parents[4] / ".cache" / "lm-eval"
FLAGS = ("--kv-policy", "importance", "--max-total-tokens", "65536", "--enable-cache-report")


def test_a_server_beside_itself_answers_alike_and_from_its_cache(probe_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs.json"
    with script_server(*FLAGS, model=probe_model) as server:
        words = ["ruler", "--url", server.base_url, "--compare", server.base_url, "--json", str(out)]
        words += ["--tokenizer", str(probe_model), "--tasks", "niah_single_1", "--lengths", "1024"]
        words += ["--harness", str(HARNESS), "--install", "--answer-tokens", "8"]
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    first, second = (run["parts"][0] for run in json.loads(out.read_text())["runs"])
    assert len(first["samples"]) == len(second["samples"]) == 20
    assert len({each["prompt"] for each in first["samples"]}) == 20
    assert first["samples"] == second["samples"]
    assert all(each["answer"] for each in first["samples"])
    assert second["cached_tokens"] > 0.9 * second["prompt_tokens"] > 20 * 500
