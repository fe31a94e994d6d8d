"""`sgl-importance agree` on real servers: equal ones, one with a bad selector, one that cannot be forced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sgl_importance_lab.agree.cli import app
from sgl_importance_lab.probe.tasks import make_document, question_text

from support.served import script_server
from support.servers import ServerProcess

pytestmark = [pytest.mark.server, pytest.mark.nightly]  # two servers

FLAGS = (
    *("--kv-policy", "importance", "--kv-residency", "tiered", "--page-size", "16"),
    *("--max-total-tokens", "4096", "--kv-device-tokens", "2048", "--max-running-requests", "2"),
)
FORCED = ("--enable-custom-logit-processor", "--disable-overlap-schedule")
BAD = ("--kv-sparse-selector", "window", "--kv-sparse-budget", "80", "--kv-sparse-min-context", "64")


@pytest.fixture(scope="module")
def exact(probe_model: Path) -> Iterator[ServerProcess]:
    """It reads every page, and takes no processors."""
    with script_server(*FLAGS, "--kv-sparse-selector", "all", model=probe_model) as server:
        yield server


@pytest.fixture(scope="module")
def recent(probe_model: Path) -> Iterator[ServerProcess]:
    """It reads the last five pages."""
    with script_server(*FLAGS, *FORCED, *BAD, model=probe_model) as server:
        yield server


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A document each, in three shapes of records, and a question whose record lies far back."""
    file = tmp_path_factory.mktemp("agree") / "prompts.jsonl"
    records: list[dict[str, Any]] = []
    for seed in range(3):
        document = make_document(600, seed)
        text = f"{document.text} {question_text(document.record_list[0][0])}"
        records.append({"messages": [{"role": "user", "content": text}]})
    records.append({"prompt": make_document(600, 7).text})
    records.append({"body": {"prompt": make_document(600, 8).text}})
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def agree(prompts: Path, first: ServerProcess, second: ServerProcess, *arguments: str) -> dict[str, Any]:
    out = prompts.with_name("agree.json")
    words = [str(prompts), "--url", first.base_url, "--compare", second.base_url, "--tokens", "12"]
    done = CliRunner().invoke(app, [*words, "--json", str(out), *arguments])
    assert done.exit_code == 0, done.output
    assert f"{len(prompts.read_text().splitlines())} prompts" in done.stdout
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_bad_selector_shows_and_is_compared_to_the_end(
    prompts: Path, exact: ServerProcess, recent: ServerProcess
) -> None:
    found = agree(prompts, exact, recent)
    assert found["how"] == "forced"
    assert any(row["first_difference"] is not None for row in found["prompts"])
    assert found["summary"]["equal tokens"]["value"] < 1
    assert found["summary"]["KL of top logprobs, nats a token"]["value"] > 1e-3
    different = next(row for row in found["prompts"] if row["first_difference"] is not None)
    assert different["compared"] > different["first_difference"] + 1  # it did not end there


def test_a_server_agrees_with_itself_though_its_answer_is_forced(
    prompts: Path, recent: ServerProcess
) -> None:
    found = agree(prompts, recent, recent)
    assert found["how"] == "forced"
    assert found["summary"]["equal tokens"]["value"] == 1
    assert found["summary"]["prompts without a difference"]["value"] == 1
    assert found["summary"]["KL of top logprobs, nats a token"]["value"] < 1e-6


def test_a_server_that_cannot_be_forced_is_compared_up_to_the_first_difference(
    prompts: Path, exact: ServerProcess, recent: ServerProcess
) -> None:
    found = agree(prompts, recent, exact)
    assert found["how"] == "free"
    for row in found["prompts"]:
        at = row["first_difference"]
        assert row["equal"] == row["compared"] - (at is not None)
        assert at is None or at == row["compared"] - 1
    assert agree(prompts, exact, exact)["summary"]["equal tokens"]["value"] == 1


def test_a_run_that_was_cut_off_asks_only_for_the_rest(
    prompts: Path, exact: ServerProcess, recent: ServerProcess
) -> None:
    whole = agree(prompts, exact, recent)
    out = prompts.with_name("agree.json")
    marked = [{**row, "compared": 1000 + row["compared"]} for row in whole["prompts"][:2]]
    out.write_text(json.dumps({**whole, "prompts": marked}))
    resumed = agree(prompts, exact, recent, "--resume")
    assert resumed["prompts"] == [*marked, *whole["prompts"][2:]]
    words = [str(prompts), "--url", exact.base_url, "--compare", recent.base_url, "--tokens", "13"]
    refused = CliRunner().invoke(app, [*words, "--json", str(out), "--resume"])
    assert refused.exit_code == 2
    assert "was written with other arguments" in refused.stderr
