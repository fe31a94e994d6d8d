"""The names of options in a recording's header are those of the first release."""

from __future__ import annotations

from sgl_importance.observe.trace.recorded_options import recorded_options
from sgl_importance.options.importance_options import SETTINGS, ImportanceOptions
from sgl_importance.options.observation_options import SignalOptions

OF_THE_FIRST_RELEASE = {
    "policy",
    "source",
    "interval",
    "layers",
    "window",
    "sink_tokens",
    "local_tokens",
    "half_life_queries",
    "g",
    "pin_budget",
    "trace",
    "trace_detail",
    "trace_megabytes",
    "trace_pages",
    "store",
    "store_bytes",
    "store_backends",
    "tiers",
    "fetch_timeout_ms",
    "ledger",
    "ledger_token_ids",
    "ledger_megabytes",
    "prewarm",
    "prewarm_seconds",
    "residency",
    "device_tokens",
    "sparse_selector",
    "sparse_budget",
    "sparse_min_context",
    "sparse_prompt_tokens",
}


def test_every_option_has_the_name_that_it_had() -> None:
    recorded = recorded_options(ImportanceOptions(policy="observe", signal=SignalOptions(window=7)))
    assert set(recorded) == OF_THE_FIRST_RELEASE | {"misses_memory"}
    assert len(recorded) == len(SETTINGS)
    assert (recorded["policy"], recorded["window"]) == ("observe", 7)
