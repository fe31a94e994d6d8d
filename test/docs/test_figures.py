"""Figures in README and docs are those of benchmark/results, rounded as the sentence rounds them."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmark.serving.measured import bootstrap, paired_ratios
from benchmark.serving.report import tables

ROOT = Path(__file__).parents[2]
BUDGETS = ("1%", "2%", "5%", "10%", "20%")


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmark/results" / f"{name}.json").read_text())


def row(name: str, **wanted: Any) -> dict[str, Any]:
    (found,) = (row for row in results(name)["rows"] if wanted.items() <= row.items())
    return found


def mooncake(policy: str) -> dict[str, Any]:
    return row("policy", trace="mooncake", policy=policy)


def best_published() -> dict[str, Any]:
    ours = {
        "importance",
        "belady",
        "one class",
        "no visits",
        "no structure",
        "told who returns",
        "second hour",
    }
    rows = [r for r in results("policy")["rows"] if r["trace"] == "mooncake" and r["policy"] not in ours]
    return max(rows, key=lambda row: row["over_lru"])


def over_lru() -> list[float]:
    return [mooncake("importance")["over_lru"], best_published()["over_lru"]]


def tree_microseconds(cache: str, operation: str = "evict_one") -> float:
    value = row("tree", leaves=10_000, operation=operation, cache=cache)["microseconds"]
    assert isinstance(value, float)
    return value


def replay_rates() -> list[float]:
    others = [r["million_per_second"] for r in results("replay")["rows"][1:13] if r["what"] not in ("lru",)]
    fast = [row("replay", what=what)["million_per_second"] for what in ("lru", "importance")]
    return [*fast, min(others), max(others)]


def added_milliseconds() -> list[float]:
    return [row("emission", batch=1, context=c, **{"pass": "decode"})["added_us"] / 1e3 for c in (512, 4096)]


def first_token(measured_by: str, workload: str = "fits", arm: str = "ours") -> list[float]:
    """Ratio of the median times to a first token, and its interval."""
    rows = results("serving")["rows"]
    return list(bootstrap(paired_ratios(rows, workload, arm, "ttft_p50", measured_by=measured_by)))


def seed_ratio(workload: str, other: str, factor: int = 1) -> float:
    """Median over the seeds of our share of uncached tokens over that of ``other``."""
    shares: dict[int, dict[str, float]] = {}
    for row in results("serving")["rows"]:
        if row["pass"] == "seeds" and (row["workload"], row["factor"]) == (workload, factor):
            shares.setdefault(row["seed"], {})[row["policy"]] = row["uncached_share"]
    return statistics.median(known["importance"] / known[other] for known in shares.values())


def agents(other: str) -> list[float]:
    return [seed_ratio(f"agents-{times}x", other) for times in (2, 4, 8)]


def look_ups() -> list[float]:
    kinds = ("known", "unknown")
    return [
        row("get_importance", quantity=f"microseconds of a look-up, {kind} page")["value"] for kind in kinds
    ]


NUMBER = r"(\d*\.?\d+)"
# Page, the sentence with # for each figure, and where the figures come from.
SENTENCES: list[tuple[str, str, Callable[[], list[float]]]] = [
    (
        "README.md",
        "it hits # times as much as LRU (mean over five cache sizes; the best published policy #)",
        over_lru,
    ),
    ("README.md", "# times LRU's hit rate on a production trace", lambda: over_lru()[:1]),
    (
        "README.md",
        "`importance` (g = 1) computes #, # and # of stock LRU's tokens",
        lambda: agents("python-lru"),
    ),
    ("README.md", "and #, # and # of the best of sglang's other policies", lambda: agents("python-lfu")),
    ("README.md", "hot documents under a scan #", lambda: [seed_ratio("scan", "python-lru")]),
    ("README.md", "shared documents #", lambda: [seed_ratio("documents", "python-lru")]),
    ("README.md", "of the host tier's size #", lambda: [seed_ratio("scan-host", "python-lru")]),
    (
        "README.md",
        "LFU 0.83; over 2,560 requests ours #",
        lambda: [seed_ratio("scan-host", "python-lru", factor=8)],
    ),
    ("README.md", "chat #", lambda: [seed_ratio("chat", "python-lru")]),
    (
        "README.md",
        "and took # times as long in open loop (# to #) before",
        lambda: first_token("times"),
    ),
    (
        "README.md",
        "the median first token takes # times as long as stock's with servers side by side (# to #)",
        lambda: first_token("pairs"),
    ),
    (
        "docs/serving.md",
        "side by side by little: #, interval # to #;",
        lambda: first_token("pairs"),
    ),
    (
        "docs/serving.md",
        "open loop lost: #, interval # to #, with the code before). Nothing",
        lambda: first_token("times"),
    ),
    (
        "docs/serving.md",
        "takes as long as the Rust core (#, # to #)",
        lambda: first_token("pairs", arm="LRU (Python core)"),
    ),
    (
        "README.md",
        "median first token is at # of stock's (# to #) with agent sessions and # (# to #) with documents",
        lambda: [*first_token("times", "agents-4x"), *first_token("times", "documents")],
    ),
    (
        "docs/serving.md",
        "The median first token is at # of stock's (# to #) on `agents-4x` and # (# to #) on `documents`",
        lambda: [*first_token("times", "agents-4x"), *first_token("times", "documents")],
    ),
    ("README.md", "traffic that fits #", lambda: [seed_ratio("fits", "python-lru")]),
    (
        "docs/how_it_works.md",
        "Evicting one of 10,000 leaves takes # us; stock's LRU takes # us on its Rust tree",
        lambda: [tree_microseconds("importance"), tree_microseconds("rust-lru")],
    ),
    (
        "docs/how_it_works.md",
        "Inserting a new prompt takes # us instead of # us on the Python tree",
        lambda: [tree_microseconds(cache, "insert_new") for cache in ("importance", "python-lru")],
    ),
    ("docs/how_it_works.md", "# ms at 512 tokens of context and # ms at 4,096", added_milliseconds),
    (
        "docs/limits.md",
        "takes # ms there instead of # ms",
        lambda: [tree_microseconds("observe") / 1e3, tree_microseconds("rust-lru") / 1e3],
    ),
    (
        "docs/replay.md",
        "LRU replays at # million a second of processor time, `importance` at # million, "
        "the other policies at # to # million",
        replay_rates,
    ),
    ("docs/spec.md", "# us for a known page, # us for an unknown one", look_ups),
    (
        "docs/policy.md",
        "One class minus ours at 1,000 requests: # (# to #)",
        lambda: [results("reuse_1000")["gain"][name] for name in ("value", "low", "high")],
    ),
]


def assert_rounded(said: str, measured: float) -> None:
    decimals = len(said.partition(".")[2])
    assert abs(float(said) - measured) <= 0.5000001 * 10**-decimals, f"says {said}, measured {measured:.6g}"


@pytest.mark.parametrize(("page", "sentence", "measured"), SENTENCES, ids=[s for _, s, _ in SENTENCES])
def test_a_sentence_says_what_was_measured(
    page: str, sentence: str, measured: Callable[[], list[float]]
) -> None:
    text = " ".join((ROOT / page).read_text().split())
    found = re.search(re.escape(sentence).replace(r"\#", NUMBER), text)
    assert found, f"{page} does not say it any more: correct this test"
    for said, value in zip(found.groups(), measured(), strict=True):
        assert_rounded(said, value)


def table_rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the table whose first line holds ``heading``, without marks of emphasis."""
    lines = iter((ROOT / page).read_text().splitlines())
    assert any(heading in line for line in lines), f"{page} has no table {heading}"
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip(" *`") for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        (
            "| policy | 1 % | 2 % | 5 % | 10 % | 20 % | over LRU, mean |",
            ["lru", "arc", "tlru", "mq", "importance", "belady"],
        ),
        (
            "| arm on the Mooncake trace |",
            ["importance", "one class", "no visits", "no structure", "second hour", "told who returns"],
        ),
    ],
)
def test_the_tables_of_the_policy_say_what_was_measured(heading: str, names: list[str]) -> None:
    rows = table_rows("docs/policy.md", heading)
    assert len(rows) == len(names)
    for cells, name in zip(rows, names, strict=True):
        measured = mooncake(name)
        for said, budget in zip(cells[1:6], BUDGETS, strict=True):
            assert_rounded(said, measured[budget])
        assert_rounded(cells[6], measured["over_lru"])
        assert_rounded(cells[7].removesuffix(" %"), 100 * measured["gap_closed"])


@pytest.mark.parametrize("horizon", [100, 1000])
def test_the_brier_scores_say_what_was_measured(horizon: int) -> None:
    measured = results(f"reuse_{horizon}")["arms"]
    (cells,) = (
        cells
        for cells in table_rows("docs/policy.md", "| P(reuse within ...) |")
        if cells[0].startswith(f"{horizon:,} requests")
    )
    for said, arm in zip(cells[1:5], measured, strict=True):
        assert_rounded(said, arm["brier"])
    assert_rounded(cells[5], measured[-1]["calibration_error"])


def test_the_tables_of_the_serving_benchmark_are_those_of_its_results() -> None:
    parameters = json.loads((ROOT / "benchmark/serving/parameters.json").read_text())
    page = (ROOT / "docs/serving.md").read_text()
    for name, made in tables(results("serving")["rows"], parameters).items():
        assert f"<!-- table {name} -->\n{made}\n<!-- end {name} -->" in page, f"run --only report: {name}"


def test_the_overhead_says_what_was_measured() -> None:
    arms = [row for row in results("overhead")["rows"] if row.get("arm") == "importance"]
    rows = table_rows("docs/how_it_works.md", "| ratio of time, median and 95 % interval |")
    for cells, row in zip(rows, arms, strict=True):
        said = re.fullmatch(rf"{NUMBER} \({NUMBER} - {NUMBER}\)", cells[1])
        assert said
        for number, name in zip(said.groups(), ("ratio_to_stock", "low", "high"), strict=True):
            assert_rounded(number, row[name])


def test_the_throughput_of_the_store_says_what_was_measured() -> None:
    rows = table_rows("docs/reliability.md", "| read, verified over bare (quartiles) |")
    for cells, row in zip(rows, results("storage")["rows"], strict=True):
        for cell, what in zip(cells[1:3], ("read", "write"), strict=True):
            said, quartiles = cell.split(" ", 1)
            assert_rounded(said, row[f"{what} ratio"])
            assert quartiles == f"({row[f'{what} ratio quartiles']})"
        assert_rounded(cells[3].removesuffix(" GB/s"), row["checksum GB/s"])
