"""Modules left to scripts/nightly.sh: what each kind tests has a cheaper test in every run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

NIGHTLY = {
    "laboratory": (
        "benchmark/lab/test/conformance/",
        "benchmark/lab/test/connectors/",
        "benchmark/lab/test/kv_size/test_config_file.py",
        "benchmark/lab/test/kv_size/test_upstream_pools.py",
        "benchmark/lab/test/offline/",
        "benchmark/lab/test/policies/",
        "benchmark/lab/test/probe/",
        "benchmark/lab/test/reasoner/",
        "benchmark/lab/test/replay/test_cache.py",
        "benchmark/lab/test/replay/test_chain_replay.py",
        "benchmark/lab/test/replay/test_cut_off_sweeps.py",
        "benchmark/lab/test/replay/test_fast_importance.py",
        "benchmark/lab/test/replay/test_kv_cache_tester.py",
        "benchmark/lab/test/replay/test_lru.py",
        "benchmark/lab/test/replay/test_nodes.py",
        "benchmark/lab/test/replay/test_page_replay.py",
        "benchmark/lab/test/replay/test_ray.py",
        "benchmark/lab/test/replay/test_replay_drivers.py",
        "benchmark/lab/test/replay/test_served_nodes.py",
        "benchmark/lab/test/replay/test_served_tiers.py",
        "benchmark/lab/test/replay/test_sessions.py",
        "benchmark/lab/test/replay/test_sweeps.py",
        "benchmark/lab/test/replay/test_tiers.py",
        "benchmark/lab/test/replay/test_turns.py",
        "benchmark/lab/test/sizing/test_sizing.py",
        "benchmark/lab/test/study/",
        "benchmark/lab/test/workload/",
    ),
    "benchmarks": ("test/benchmark/",),
    "families": ("test/models/test_linear_attention.py",),
    "modes": (
        "test/attention/test_servers_without_scores.py",
        "test/cpu/test_cpu_server.py",
        "test/cpu/test_served_attention.py",
        "test/fleet/test_page_of_all.py",
        "test/fleet/test_replicas.py",
        "test/fleet/test_router.py",
        "test/fleet/test_two_servers.py",
        "test/modes/test_adapters.py",
        "test/modes/test_data_parallel.py",
        "test/modes/test_disaggregation.py",
        "test/modes/test_expert_parallel.py",
        "test/modes/test_kv_events.py",
        "test/modes/test_speculation.py",
        "test/modes/test_tensor_parallel.py",
        "test/modes/test_tokenizer_workers.py",
        "test/serve/test_emitted_scores.py",
        "test/sparse/test_served_choices.py",
    ),
    "long histories": (
        "test/abuse/http/test_fuzzed_routes.py",
        "test/abuse/test_servers.py",
        "test/equality/test_equal_after_faults.py",
        "test/equality/test_real_sessions.py",
        "test/observe/trace/test_page_list_recorder.py",
        "test/placement/test_served_answer_ends.py",
        "test/storage/test_restarts.py",
        "test/storage/test_thought_resumes.py",
        "test/storage/test_tier_chain_server.py",
        "test/storage/test_upgrade.py",
        "test/storage/test_weight_updates.py",
        "test/storage/test_zero_copy_server.py",
        "test/storage/tier_chain/test_kills.py",
        "test/tree/test_soak.py",
    ),
    "compilers and packages": (
        "test/kernels/test_flashinfer_compiles.py",
        "test/kernels/test_score_kernels_compile.py",
        "test/kernels/test_triton_compiles.py",
        "test/scripts/test_release.py",
        "test/serve/test_interpreted_producers.py",
        "test/sparse/test_tiered_in_triton.py",
    ),
}
"""Kind -> modules, and folders that end with a slash."""
OTHER = "more examples and cases"
"""Kind of a test that is marked ``nightly`` where it stands."""


def nightly_kind(module: str) -> str | None:
    """Kind of a module that is left to the nightly run; None for one of every run."""
    for kind, paths in NIGHTLY.items():
        if any(module == path or (path.endswith("/") and module.startswith(path)) for path in paths):
            return kind
    return None


def is_module(path: Path) -> bool:
    return path.suffix == ".py" and path.name.startswith("test_")


def mark_nightly(items: Iterable[pytest.Item]) -> None:
    for item in items:
        if nightly_kind(item.nodeid.partition("::")[0]):
            item.add_marker(pytest.mark.nightly)
            item.add_marker(pytest.mark.nightly_module)


def count_kinds(items: Iterable[pytest.Item]) -> dict[str, int]:
    """How many of some tests the nightly run makes, by kind."""
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    return dict(Counter(nightly_kind(item.nodeid.partition("::")[0]) or OTHER for item in nightly))


def what_is_left(modules: Mapping[str, int], tests: Mapping[str, int]) -> str:
    """One line, for the end of a run; empty where nothing is.

    Args:
        modules: that were not imported, by kind.
        tests: of the others, by kind.
    """
    parts = [
        f"{sum(kinds.values()):,} {what} ("
        + ", ".join(f"{kind} {count:,}" for kind, count in sorted(kinds.items()))
        + ")"
        for what, kinds in (("modules", modules), ("tests", tests))
        if kinds
    ]
    return f"Left to scripts/nightly.sh: {' and '.join(parts)}" if parts else ""
