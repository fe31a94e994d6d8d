"""Flags that an earlier release had: each is refused with the line that says what to write now."""

from __future__ import annotations

_NEW_PLACES = {
    "--kv-importance-interval": ("signal", "interval = N"),
    "--kv-importance-layers": ("signal", "layers = [INDEX, ...]"),
    "--kv-importance-window": ("signal", "window = N"),
    "--kv-importance-sink-tokens": ("signal", "sink_tokens = N"),
    "--kv-importance-local-tokens": ("signal", "local_tokens = N"),
    "--kv-importance-half-life-queries": ("signal", "half_life_queries = X"),
    "--kv-importance-trace-detail": ("trace", 'detail = "steps"'),
    "--kv-importance-trace-megabytes": ("trace", "megabytes = N"),
    "--kv-importance-trace-pages": ("trace", "pages = X"),
    "--kv-importance-fetch-timeout-ms": ("store", "fetch_timeout_ms = N"),
    "--kv-importance-ledger-megabytes": ("ledger", "megabytes = N"),
    "--kv-importance-prewarm-seconds": ("prewarm", "seconds = N"),
}
_AGREE = "leave it out; 'sgl-importance agree' compares answers with those of a server that reads every page"
_GONE = {
    "--kv-importance-g": "leave it out: attention has no say in evictions. To measure what it would do to a "
    'model, write g = "on" under [signal] in the file of --kv-importance-config',
    "--kv-importance-gate": "leave it out; --hicache-write-policy write_back stores less, and hits more",
    "--kv-importance-gate-payback": "leave it out, as --kv-importance-gate, which it was for",
    "--kv-sparse-audit-confidence": _AGREE,
    "--kv-sparse-audit-interval": _AGREE,
    "--kv-sparse-audit-missed-page": _AGREE,
    "--kv-importance-auto-pins": "leave it out, and pin by 'sgl-importance pin' or the hint retain",
    "--kv-residency-policy": "leave it out: the least recently read page leaves the device",
    "--kv-sparse-resident-bias": "leave it out, and raise --kv-device-tokens where too many pages are loaded",
    "--kv-sparse-prune": "leave it out, and lower --kv-sparse-budget where fewer pages will do",
    "--kv-sparse-dense-layers": "leave it out, and raise --kv-sparse-budget where answers miss something",
}

MOVED_FLAGS: dict[str, str] = {
    **{
        flag: f"moved: write {key} under [{group}] in the file of --kv-importance-config"
        for flag, (group, key) in _NEW_PLACES.items()
    },
    **{flag: f"is gone: {instead}" for flag, instead in _GONE.items()},
}
"""What each of them says behind its name."""
