"""Flags that an earlier release had: each is refused with the line that says what to write now."""

from __future__ import annotations

_HERE = "in the file of --kv-importance-config"
_NEW_PLACES = {
    "--kv-importance-interval": ("signal", "interval = N"),
    "--kv-importance-layers": ("signal", "layers = [INDEX, ...]"),
    "--kv-importance-window": ("signal", "window = N"),
    "--kv-importance-sink-tokens": ("signal", "sink_tokens = N"),
    "--kv-importance-local-tokens": ("signal", "local_tokens = N"),
    "--kv-importance-half-life-queries": ("signal", "half_life_queries = X"),
    "--kv-importance-auto-pins": ("pins", 'auto = "on"'),
    "--kv-importance-trace-detail": ("trace", 'detail = "steps"'),
    "--kv-importance-trace-megabytes": ("trace", "megabytes = N"),
    "--kv-importance-trace-pages": ("trace", "pages = X"),
    "--kv-importance-store-backends": ("store", 'backends = "any"'),
    "--kv-importance-fetch-timeout-ms": ("store", "fetch_timeout_ms = N"),
    "--kv-importance-ledger-megabytes": ("ledger", "megabytes = N"),
    "--kv-importance-prewarm-seconds": ("prewarm", "seconds = N"),
    "--kv-residency-policy": ("tiered", 'policy = "lru"'),
    "--kv-sparse-prune": ("sparse", 'prune = "topp:P"'),
    "--kv-sparse-resident-bias": ("sparse", "resident_bias = X"),
    "--kv-sparse-audit-missed-page": ("sparse", "audit_missed_page = X"),
}
_GONE = {
    "--kv-importance-gate": "is gone, it paid no better than a coin: drop it, or try --hicache-write-policy write_back",
    "--kv-importance-gate-payback": "is gone, with the gate that it set: drop it",
    "--kv-sparse-audit-confidence": "is gone, it saved 5 of 101 wrong answers: use --kv-sparse-audit-interval",
    "--kv-sparse-dense-layers": "is gone, dense layers did not pay: drop it, or raise --kv-sparse-budget",
}

MOVED_FLAGS: dict[str, str] = {
    **{flag: f"moved: write {key} under [{group}] {_HERE}" for flag, (group, key) in _NEW_PLACES.items()},
    **_GONE,
}
"""What each of them says behind its name."""
