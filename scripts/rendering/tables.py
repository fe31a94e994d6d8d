"""Tables of measurements, as Markdown, made of ``benchmark/results`` and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from benchmark.serving.measured import table as _table
from benchmark.serving.report import tables as _tables
from scripts.rendering.cells import interval as _interval
from scripts.rendering.cells import share as _share
from scripts.rendering.figures import _serving, policy_on, results, row, seeds

from support.nightly_modules import nightly_kind

_BUDGETS = ("1%", "2%", "5%", "10%", "20%")


# ---- does it pay ----


@cache
def _serving_tables() -> dict[str, str]:
    measured = _serving()
    return _tables(measured.rows, measured.parameters)


def serving_table(name: str) -> str:
    """A table of the serving benchmark, by its name in ``benchmark/serving/report.py``."""
    return _serving_tables()[name]


_IN_SHORT = {
    "agents-2x": "agent sessions that need twice the cache",
    "agents-4x": "the same, four times",
    "agents-8x": "the same, eight times",
    "scan": "two hot documents under a scan",
    "scan-host": "documents under one-off prompts, with the host tier's room",
    "documents": "questions about shared documents",
    "chat": "chat",
    "fits": "everything fits",
}


def worth_in_short() -> str:
    """Our uncached tokens over those of LRU and LFU: median of ten seeds and its 95 % interval."""

    def cell(workload: str, other: str) -> str:
        median, low, high = seeds(workload, other)
        return f"{median:.2f} ({low:.2f} to {high:.2f})"

    lines = [[words, cell(name, "python-lru"), cell(name, "python-lfu")] for name, words in _IN_SHORT.items()]
    return _table(["workload", "beside LRU", "beside LFU"], lines)


# ---- the policy ----


def policy_table(names: Mapping[str, str]) -> str:
    """Hit rates on the Mooncake trace.

    Args:
        names: by policy or arm, what the table calls it; emphasis included.
    """
    lines = []
    for policy, shown in names.items():
        found = policy_on(policy)
        rates = [_share(found[budget]) for budget in _BUDGETS]
        lines.append([shown, *rates, f"{found['over_lru']:.2f}", f"{found['gap_closed']:.0%}"])
    titles = [f"{budget} of the blocks" for budget in _BUDGETS[:1]] + list(_BUDGETS[1:])
    return _table(["policy", *titles, "over LRU, mean", "of the gap to the optimum"], lines)


def day_table() -> str:
    """A day of traffic through a replay, by size and policy."""
    lines = [
        [
            f"{each['accesses'] / 1e6:,.0f}",
            f"{each['unique_blocks'] / 1e6:,.1f}",
            f"`{each['policy']}`",
            f"{each['capacity_blocks']:,}",
            _share(each["block_hit_rate"]),
            f"{each['replay_seconds']:,.1f}",
            f"{each['million_per_second']:.2g}",
            f"{each['peak_mib'] / 1024:.2f}",
        ]
        for each in results("day")["rows"]
    ]
    titles = ["million accesses", "million unique blocks", "policy", "pool in blocks", "block hits"]
    return _table([*titles, "processor seconds", "million a second", "peak GiB"], lines)


def sweep_table() -> str:
    """A sweep of replays in a process pool and on Ray."""
    lines = [
        [
            each["workers"],
            f"{each['cells']:,}",
            f"{each['accesses'] / 1e6:,.1f}",
            f"{each['seconds']:,.0f}",
            f"{each['least_seconds']:,.0f} to {each['most_seconds']:,.0f}",
            f"{each['cells_per_second_and_core']:.2f}",
        ]
        for each in results("sweep")["rows"]
    ]
    titles = ["workers", "cells", "million accesses", "seconds, median", "all", "cells a second and core"]
    return _table(titles, lines)


def brier_table() -> str:
    """How right predictions of reuse are, by what the classes know."""
    lines = []
    for horizon in (100, 1000):
        arms = results(f"reuse_{horizon}")["arms"]
        scores = [f"{arm['brier']:.4f}" for arm in arms]
        lines.append([f"{horizon:,} requests", *scores, f"{arms[-1]['calibration_error']:.3f}"])
    names = [arm["name"] for arm in results("reuse_100")["arms"]]
    return _table(["P(reuse within ...), Brier score", *names, "calibration error"], lines)


# ---- placement ----

_TRACES = {"mooncake": "Mooncake, second half", "miniswe": "miniswe (tuned)", "taubench": "taubench"}


def gating_table() -> str:
    """Arms of the tiered replay beside ``write_through`` without a gate, but for bars of displacement."""
    lines = []
    for each in results("gating")["rows"]:
        if "displacement" in each["arm"]:
            continue
        trace = _TRACES[each["trace"].partition(" ")[0].partition(",")[0]]
        values = [
            f"{each[f'{value}_over_base']:{form}}"
            for value, form in (
                ("host_bytes", ".2f"),
                ("storage_bytes", ".2f"),
                ("hits", ".3f"),
                ("recomputed", ".3f"),
                ("ttft", ".3f"),
            )
        ]
        lines.append([trace, f"`{each['write_policy']}`", each["arm"], *values])
    values = ["host bytes", "storage bytes", "tokens hit", "recomputed", "TTFT"]
    return _table(["trace", "write policy", "arm", *values], lines)


def restart_table() -> str:
    """First requests after a restart, with and without a pre-warm from the ledger."""
    asked = {
        "first request": "the very first request",
        "first of a prefix": "first request for each of three more prefixes",
        "unknown prompt": "a prompt that nobody knows",
    }
    lines = []
    for what, shown in asked.items():
        arms = [
            next(r for r in results("restart")["rows"] if (r["asked"], r["arm"]) == (what, arm) and "n" in r)
            for arm in ("pre-warmed", "not pre-warmed")
        ]
        lines.append([shown, *(_interval(arm, "ratio") for arm in arms), str(arms[0]["n"])])
    return _table(["", "pre-warmed", "not pre-warmed", "n"], lines)


# ---- what it costs ----


def overhead_table() -> str:
    """Time of a whole server under importance over stock's."""
    shown = {
        "shared documents": "questions about shared documents",
        "long generation": "long generation",
        "unique prompts": "unique prompts, pool under eviction",
    }
    lines = [
        [words, _interval(row("overhead", workload=workload, arm="importance"), "ratio_to_stock")]
        for workload, words in shown.items()
    ]
    return _table(["workload", "ratio of time, median and 95 % interval"], lines)


def storage_table() -> str:
    """Throughput of the verified store over upstream's bare file backend."""
    lines = []
    for each in results("storage")["rows"]:
        size = each["page KiB"]
        cells = [
            f"{each[f'{what} ratio']:.2f} ({each[f'{what} ratio quartiles']})" for what in ("read", "write")
        ]
        size = f"{size} KiB" if size < 1024 else f"{size // 1024} MiB"
        lines.append([size, *cells, f"{each['checksum GB/s']:.1f} GB/s"])
    titles = ["size of a page", "read, verified over bare (quartiles)", "write (quartiles)", "checksum alone"]
    return _table(titles, lines)


def faults_summary() -> str:
    """How many, with which sglang and when; a run in which a test fails writes nothing."""
    found = results("faults")
    faults, version = len(found["rows"]), found["versions"]["sglang"]
    made = f"sglang {version}, {found['date']}, `{found['command']}`"
    return f"{faults} faults, 0 wrong tokens, 0 hangs ({made})."


def faults_table() -> str:
    """Every fault that the last run of the fault tests injected, and what came of it."""
    lines = [[each["fault"], each["outcome"], f"`{each['counter']}`"] for each in results("faults")["rows"]]
    return _table(["fault", "what happened", "counter"], lines)


# ---- broken lines ----


def mutations_summary() -> str:
    """How many lines were broken, how many of them a test noticed, and when."""
    found = results("mutations")
    noticed = sum(each["outcome"] == "noticed" for each in found["rows"])
    return f"{noticed} of {len(found['rows'])} were noticed ({found['date']}, `{found['command']}`)."


def mutations_table() -> str:
    """What each broken line would do to a user, the test that noticed, and which run has that test."""
    lines = []
    for each in results("mutations")["rows"]:
        test = (each["noticed_by"] or "").partition("[")[0]  # of which case says less than its name
        noticed_by = f"`{test}`" if test else f"**{each['outcome']}**"
        # A module may have moved to the nightly run since.
        run = "nightly" if nightly_kind(test.partition("::")[0]) else each["run"]
        lines.append([each["breaks"], f"`{each['file']}`", noticed_by, run or ""])
    return _table(["broken so that", "in", "noticed by", "run"], lines)


# ---- findings ----

_SETTINGS = {
    ("base", "as recorded"): "all four layers, window 32, half-life 32, body mass",
    ("half-life, queries", "1"): "half-life of 1 query",
    ("half-life, queries", "4"): "half-life of 4 queries",
    ("half-life, queries", "64"): "half-life of 64 queries",
    ("quantity", "peak"): "peak",
    ("quantity", "mass"): "raw mass",
    ("page size, tokens", "32"): "pages of 32 tokens",
    ("page size, tokens", "64"): "pages of 64 tokens",
    ("layers", "0"): "layer 0 alone",
    ("layers", "1"): "layer 1 alone",
    ("layers", "2"): "layer 2 alone",
    ("layers", "3"): "layer 3 alone",
    ("window", "1"): "window of 1 token",
    ("window", "8"): "window of 8 tokens",
    ("quantity", "mean or sum over blocks of 16 pages of 1 tokens"): "1-token pages, sum of 16",
    ("quantity", "maximum over blocks of 16 pages of 1 tokens"): "1-token pages, maximum of 16",
}


def sensitivity_table() -> str:
    """Whether pages that a setting marks hold the answer."""
    lines = []
    for (setting, value), shown in _SETTINGS.items():
        found = row("findings/sensitivity/sensitivity", setting=setting, value=value)
        own = _interval(found, "own answer", "own_low", "own_high")
        earlier = _interval(found, "earlier answer", "earlier_low", "earlier_high")
        lines.append([shown, own, earlier])
    return _table(
        ["scores from", "own top 10 % hold the answer", "top 20 % by earlier queries hold it"], lines
    )


def agreement_table() -> str:
    """H2: how alike the top pages of one query and of all others are."""
    rows = results("findings/h2/h2")["rows"]
    return _table(
        ["recording", "Jaccard, 95 % interval"], [[r["workload"], _interval(r, "jaccard")] for r in rows]
    )


def sparse_serving_table() -> str:
    """H1, top 10 %, budget 20 %."""
    policies = ["lru", "lfu", "recency+sinks", "ema", "window", "combined", "optimum"]
    lines = []
    for each in results("findings/h1/h1")["rows"]:
        if (each["top"], each["budget"]) == (0.1, 0.2):
            rates = [f"{each[policy]:.3f}" for policy in policies]
            difference = _interval(each, "ema-lru", form=".3f")
            lines.append([each["workload"], each["context"], str(each["streams"]), *rates, difference])
    shown = ["LRU", "LFU", "recency + sinks", "EMA", "window", "combined", "optimum", "EMA - LRU"]
    return _table(["steps", "context, tokens", "streams", *shown], lines)


def g_table() -> str:
    """Token hit rate of the mixed recording with g, without, and with that of another node."""
    lines = []
    for each in results("findings/g/g")["rows"]:
        if (each["recording"], each["workload"]) == ("mixed", "all"):
            rates = [f"{each[arm]:.3f}" for arm in ("lru", "ours", "g1", "shuffled")]
            lines.append([f"{each['capacity']:.0%}", *rates, _interval(each, "ours-g1", form=".3f")])
    return _table(["capacity", "LRU", "ours", "ours, g = 1", "ours, g shuffled", "ours - (g = 1)"], lines)


# ---- how much memory a model's cache takes ----


def kv_size_table() -> str:
    """Of every bundled model, from ``benchmark/kv_size.py``."""

    def times(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    def count(value: int | None) -> str:
        return "" if value is None else f"{value:,}"

    lines = [
        [
            f"`{each['model']}`",
            each["layers"],
            count(each["bytes_per_token"]),
            count(each["bytes_per_token_fp8"]),
            count(each["bytes_per_token_per_gpu_of_8"]),
            f"{each['request_bytes'] / 1e9:.2f}",
            f"{each['never_read']:.0%}" if each["never_read"] > 0.001 else "",
            times(each["over_as_mha"]),
            times(each["over_as_mha_8_gpus"]),
        ]
        for each in results("kv_size")["rows"]
    ]
    titles = [
        "model",
        "layers",
        "bytes a token",
        "in fp8",
        "on each of 8 GPUs",
        "GB of 32,768 tokens",
        "never read",
    ]
    return _table([*titles, "as MHA, times", "as MHA on 8 GPUs, times"], lines)


def odd_requests_table() -> str:
    """Requests with an odd field that end or break a stock server, and our answer."""
    rows = [row for row in results("odd_fields")["rows"] if row["route"] != "all"]
    lines = [
        [f"`{row['route']}`", f"`{row['fields']}`", str(row["stock"]), str(row["importance"])] for row in rows
    ]
    return _table(["route", "fields", "stock sglang", "here"], lines)


def odd_requests() -> str:
    """How many requests were sent to find those."""
    return f"{results('odd_fields')['rows'][-1]['requests']:,}"


def odd_requests_stood() -> str:
    """What became of odd requests by kind of server."""
    lines = []
    for run in results("odd_requests")["rows"]:
        answers: Mapping[str, int] = run["answers"]
        refused = sum(number for status, number in answers.items() if status.startswith("4"))
        failed = sum(number for status, number in answers.items() if status in ("500", "502", "504"))
        counts = (run["requests"], answers.get("200", 0), refused, failed, answers.get("0", 0))
        grown = run["memory_mb"] - run["memory_mb_at_start"]
        ends = sum("path" not in finding for finding in run["findings"])  # of no request alone
        rest = (ends, run["canary_changed"], grown)
        lines.append([run["kind"], *(f"{number:,}" for number in (*counts, *rest))])
    heads = ["server", "requests", "answered", "refused", "500", "late", "ends", "canary changed", "MB grown"]
    return _table(heads, lines)


def odd_requests_sent() -> str:
    """Their number."""
    return f"{sum(run['requests'] for run in results('odd_requests')['rows']):,}"


def misses_cost() -> str:
    """Microseconds of the scheduler a request that the account of misses takes, least to most."""
    means = sorted(row["account_mean"] for row in results("misses")["rows"])
    return f"{means[0]:.0f} to {means[-1]:.0f} microseconds"


def tree_cost_beside_misses() -> str:
    """What the radix tree takes for the same requests, least to most."""
    means = sorted(row["tree_mean"] for row in results("misses")["rows"])
    return f"{means[0] / 1000:.1f} to {means[-1] / 1000:.1f} ms"
