"""A trace through a chain of tiers: it hits as one tier would, and asks for what is wrong in one line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.storage.tier_chain.tier_file import parse_tiers
from sgl_importance_lab.replay.cli import app
from sgl_importance_lab.replay.compiled.fast_lru import replay_lru
from sgl_importance_lab.replay.lower_tiers.chain_ranking import CHAIN_POLICIES
from sgl_importance_lab.replay.lower_tiers.chain_replay import (
    ChainHardware,
    capacities,
    common_fetch,
    replay_chain,
)
from sgl_importance_lab.replay.trace import Trace, TraceBuilder

TIERS = """
[[tier]]
kind = "dram"
capacity = "1MB"
bytes_per_second = "64GB"
price_per_gb_hour = 2

[[tier]]
kind = "nvme"
folder = "/nowhere"
capacity = "3MB"
bytes_per_second = "8GB"
latency_us = 100
"""
HARDWARE = ChainHardware(prefill_tokens_per_second=1000.0, bytes_per_token=100)


def sessions(seed: int, *, with_ends: bool = False) -> Trace:
    """Sessions that grow turn by turn, a few at a time, under three system prompts."""
    rng = random.Random(seed)
    builder = TraceBuilder("made", 10)
    alive: list[tuple[tuple[int, ...], AnswerEnd]] = []
    for request in range(400):
        if len(alive) < 4 or rng.random() < 0.1:
            alive.append(((rng.randrange(3), request), AnswerEnd.UNKNOWN))
        turn, _ = alive.pop(rng.randrange(len(alive)))
        turn = (*turn, *(1000 * request + extra for extra in range(rng.randint(1, 4))))
        end = rng.choice([AnswerEnd.TOOL_CALL, AnswerEnd.END_OF_TURN]) if with_ends else AnswerEnd.UNKNOWN
        builder.add(
            [turn[: depth + 1] for depth in range(len(turn))],
            input_tokens=10 * len(turn) - 3,
            output_tokens=5,
            seconds=float(request),
            answer_end=end,
        )
        if len(turn) < 25 and rng.random() < 0.9:
            alive.append((turn, end))
    return builder.build()


@pytest.mark.parametrize("blocks", [(5, 10), (3, 3, 30), (40, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_a_chain_of_lru_tiers_hits_as_one(seed: int, blocks: tuple[int, ...]) -> None:
    """But for blocks that a long path keeps from changing places; each tier has room for one that does."""
    trace = sessions(seed)
    tiers = [*parse_tiers(TIERS).tiers, parse_tiers(TIERS).tiers[1]][: len(blocks)]
    counts = replay_chain(trace, tiers, blocks, "lru", HARDWARE)
    found = sum(tier.hit_tokens for tier in counts.tiers)
    assert found == pytest.approx(replay_lru(trace, sum(blocks) - len(blocks)).hit_tokens, rel=0.01)
    assert all(tier.hit_tokens and tier.moved_in_blocks for tier in counts.tiers)


@pytest.mark.parametrize("with_ends", [False, True])
@pytest.mark.parametrize("policy", CHAIN_POLICIES)
def test_every_prompt_token_is_found_or_computed(policy: str, with_ends: bool) -> None:
    trace = sessions(7, with_ends=with_ends)
    spec = parse_tiers(TIERS)
    blocks = capacities(spec, trace, HARDWARE.bytes_per_token, 0.1)
    assert sum(blocks) == pytest.approx(0.1 * trace.num_blocks, abs=2)
    counts = replay_chain(trace, spec.tiers, blocks, policy, HARDWARE)
    found = sum(tier.hit_tokens for tier in counts.tiers)
    assert found + counts.recomputed_tokens == trace.input_tokens.sum()
    assert counts.tiers[0].hit_tokens > 0
    expected = counts.fetch_seconds.sum() + counts.recomputed_tokens / 1000.0
    assert counts.ttft_seconds.sum() == pytest.approx(expected)
    least = sum(
        tier.hit_tokens * 100 / spec.tiers[level].bytes_per_second for level, tier in enumerate(counts.tiers)
    )
    assert counts.fetch_seconds.sum() >= least


def test_what_both_find_is_compared_token_by_token() -> None:
    trace, spec = sessions(7), parse_tiers(TIERS)
    arms = [replay_chain(trace, spec.tiers, [6, 20], policy, HARDWARE) for policy in CHAIN_POLICIES]
    share, (lru, ours) = common_fetch(trace, spec.tiers, [arm.found for arm in arms], 100)
    prompt = trace.input_tokens.sum()
    expected, common = [0.0, 0.0], 0
    for index, tokens in enumerate(trace.input_tokens):
        both = min(len(arm.found[index]) for arm in arms)
        common += min(both * trace.block_tokens, tokens)
        for which, arm in enumerate(arms):
            slow = sum(level == 1 for level in arm.found[index][:both])
            fast = min(both * trace.block_tokens, tokens) - slow * trace.block_tokens
            expected[which] += fast * 100 / 64e9 + slow * 1000 / 8e9 + (slow > 0) * 1e-4
    assert share == common / prompt
    assert 0 < share <= min(1 - arm.recomputed_tokens / prompt for arm in arms)
    assert [lru, ours] == pytest.approx([each / common for each in expected], rel=1e-3)
    (alone,) = common_fetch(trace, spec.tiers, [arms[1].found], 100)[1]
    assert alone == pytest.approx(arms[1].fetch_seconds.sum() / (prompt - arms[1].recomputed_tokens))


def test_moves_of_a_replay_keep_to_their_bytes_per_second() -> None:
    trace = sessions(1)
    spec = parse_tiers(TIERS)
    block_bytes = trace.block_tokens * HARDWARE.bytes_per_token
    free = replay_chain(trace, spec.tiers, [6, 20], "lru", HARDWARE)
    bound = replay_chain(trace, spec.tiers, [6, 20], "lru", HARDWARE, move_bytes_per_second=block_bytes)
    seconds = trace.seconds[-1] - trace.seconds[0]
    for tier, without in zip(bound.tiers, free.tiers, strict=True):
        assert tier.moved_in_blocks <= seconds + 1 < without.moved_in_blocks


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    trace, tiers = tmp_path / "trace.jsonl", tmp_path / "tiers.toml"
    rows = [
        {
            "timestamp": 1000 * i,
            "input_length": 1536,
            "output_length": 1,
            "hash_ids": [i % 7, 100 + i % 7, 200 + i],
        }
        for i in range(60)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiers.write_text(TIERS)
    return trace, tiers


def test_the_command(files: tuple[Path, Path], tmp_path: Path) -> None:
    trace, tiers = files
    out = tmp_path / "rows.json"
    arguments = [trace, "--tiers", tiers, "--capacity-fraction", "0.2,0.5", "--policies", "lru,importance"]
    arguments += ["--json", out, "--jobs", "1", "--price-computed", "3"]
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    assert "lru, one tier" in result.output
    rows = json.loads(out.read_text())
    assert [(row["policy"], row["one_tier"], row["fraction"]) for row in rows[:3]] == [
        ("lru", False, 0.2),
        ("importance", False, 0.2),
        ("lru", True, 0.2),
    ]
    (row,) = [
        row for row in rows if row["policy"] == "lru" and row["fraction"] == 0.5 and not row["one_tier"]
    ]
    gigabytes = row["tiers"][0]["capacity_blocks"] * 512 * 131_072 / 1e9
    assert row["price"] == pytest.approx(2 * gigabytes * 59 / 3600 + 3 * row["recomputed_tokens"] / 1e6)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--capacity-blocks", "3"], "leave out other sizes"),
        (["--policies", "arc"], "use lru or importance"),
        (["--object-level"], "leave out other sizes"),
        (["--host-blocks", "5"], "leave out other sizes"),
        (["--policies", "belady"], "use lru or importance"),
        (["--policies", "importance,belady"], "has no optimum"),
        (["--bytes-per-token", "100000000"], "or sizes by --capacity-fraction"),
        (["--chunk-tokens", "512"], "--chunk-tokens says how long nodes are: it needs --node-granular"),
        (["--host-policy", "lru"], "--host-policy says nothing to --tiers: leave it out"),
        (["--storage-policy", "lru"], "--storage-policy says nothing to --tiers: leave it out"),
        (["--write-policy", "write_back"], "--write-policy says nothing to --tiers: leave it out"),
        (["--selected", "0.2"], "--selected says nothing to --tiers: leave it out"),
    ],
)
def test_what_does_not_go_together(files: tuple[Path, Path], arguments: list[str], problem: str) -> None:
    trace, tiers = files
    result = CliRunner().invoke(app, [str(trace), "--tiers", str(tiers), *arguments])
    assert result.exit_code == 2
    assert problem in result.output


def test_a_bad_file_of_tiers_gets_one_line(files: tuple[Path, Path]) -> None:
    trace, tiers = files
    tiers.write_text("[[tier]]\nkind = 'tape'")
    result = CliRunner().invoke(app, [str(trace), "--tiers", str(tiers)])
    assert result.exit_code == 2
    assert "use one of" in result.output
