"""Options that earlier versions had: whoever still gives one learns what to do instead."""

from __future__ import annotations

from sgl_importance.settings import flag

GONE: dict[str, str] = {
    "gate": "leave it out; --hicache-write-policy write_back writes less to storage, and hits more",
    "gate_payback": "leave it out; --hicache-write-policy write_back writes less to storage, and hits more",
    "sparse_audit_confidence": "use --kv-sparse-audit-interval with --kv-sparse-audit-missed-page",
    "sparse_dense_layers": "leave it out, and raise --kv-sparse-budget where answers miss something",
}
"""By the name that it had in ``SETTINGS``: what to do instead."""


def refusal(name: str) -> str:
    """One line for whoever gives the option ``name`` of ``GONE``."""
    return f"{flag(name)} is gone: {GONE[name]}"
