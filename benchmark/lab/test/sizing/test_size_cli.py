"""`sgl-importance size` on a trace: the table, the file, and errors that name the cure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sgl_importance_lab.sizing.cli import app


def _run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Eight conversations of five turns, interleaved: a cache of all of them hits all that returns."""
    rows = []
    for turn in range(1, 6):
        for chat in range(8):
            ids = [100 * chat + block for block in range(4 * turn)]
            rows.append(
                {
                    "timestamp": 1000 * len(rows),
                    "input_length": 512 * len(ids),
                    "output_length": 8,
                    "hash_ids": ids,
                }
            )
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_sizes_table_and_file(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "size.json"
    result = _run(trace, "--bytes-per-token", 1000, "--jobs", 1, "--json", out)
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert document["requests"] == 40
    curve, baseline = (document["curves"][policy] for policy in ("importance", "lru"))
    assert curve["tokens"][-1] == 8 * 20 * 512, "the last capacity holds everything"
    # Of 4 + 8 + ... + 20 blocks a turn, all but the last four are known.
    assert curve["token_hit_rates"][-1] == pytest.approx(1 - 20 / 60)
    assert curve["lru_needs_tokens"][-1] <= curve["tokens"][-1]
    assert baseline["token_hit_rates"] == sorted(baseline["token_hit_rates"])
    chosen = document["recommended"]["importance"]
    assert chosen["tokens"]["device"] >= document["traffic"]["longest_request"]
    assert chosen["bytes"]["device"] == 1000 * chosen["tokens"]["device"]
    for word in ("importance hits", "lru needs GB", "prefill s/GB", "knee", "computed"):
        assert word in result.output, word


def test_a_target_is_reached(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "size.json"
    # Nobody pays for time: without the target nothing but one request's worth is bought.
    options = (trace, "--price-prefill-hour", 0, "--jobs", 1, "--json", out)
    assert _run(*options).exit_code == 0
    unasked = json.loads(out.read_text())["recommended"]["importance"]["hit_rate"]
    assert _run(*options, "--target-hit-rate", 0.6).exit_code == 0
    asked = json.loads(out.read_text())["recommended"]["importance"]
    assert unasked < 0.6 <= asked["hit_rate"]
    assert asked["tokens"]["storage"] > asked["tokens"]["device"], "the cheapest tier reaches it"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target-hit-rate", 0.99), "lower --target-hit-rate"),
        (("--policy", "belady"), "one policy that a server can run"),
        (("--policy", "nonsense"), "unknown policy"),
        (("--json", "no/such/folder/out.json"), "create it first"),
        (("--price-host", "inf"), "--price-host"),  # 0 GB of it would cost nan
        (("--hours", "inf"), "--hours"),
    ],
)
def test_errors_are_one_line_with_a_cure(trace: Path, options: tuple[object, ...], message: str) -> None:
    result = _run(trace, *options, "--jobs", 1)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_trace_without_times_needs_hours(trace: Path, tmp_path: Path) -> None:
    still = tmp_path / "still.jsonl"
    rows = [json.loads(line) | {"timestamp": 0} for line in trace.read_text().splitlines()]
    still.write_text("\n".join(map(json.dumps, rows)))
    result = _run(still, "--jobs", 1)
    assert (result.exit_code, "--hours" in result.output) == (2, True)
    assert _run(still, "--hours", 2, "--jobs", 1).exit_code == 0
