"""Options that earlier versions had: whoever still gives one learns what to do instead."""

from __future__ import annotations

GONE: dict[str, str] = {
    "kv_importance_gate": "leave it out; --hicache-write-policy write_back stores less, and hits more",
    "kv_importance_gate_payback": "leave it out, as --kv-importance-gate, which it was for",
    "kv_sparse_audit_confidence": "use --kv-sparse-audit-interval with --kv-sparse-audit-missed-page",
    "kv_sparse_dense_layers": "leave it out, and raise --kv-sparse-budget where answers miss something",
}
"""By the name that it had among sglang's arguments: what to do instead."""


def gone_flag(keyword: str) -> str:
    """The flag that an option of ``GONE`` had."""
    return "--" + keyword.replace("_", "-")


def refusal(keyword: str) -> str:
    """One line for whoever gives an option of ``GONE``."""
    return f"{gone_flag(keyword)} is gone: {GONE[keyword]}"
