"""Servers whose pages are tiered, with room on the device for a small part of what they hold."""

from __future__ import annotations

from pathlib import Path

from support.served import script_server
from support.servers import ServerProcess
from support.workloads.exchanges import POOL_FLAGS, POOL_TOKENS

# Beside staging and tables the device has eleven slots: one for the page that each of eight requests fills,
# and three more, where prompts have up to fifty pages.
DEVICE_TOKENS = 360


def tiered_server(
    model: Path, *flags: str, env: dict[str, str] | None = None, imports_anew: bool = False
) -> ServerProcess:
    return script_server(
        *("--kv-policy", "importance", "--kv-residency", "tiered"),
        *(*POOL_FLAGS, "--max-total-tokens", str(POOL_TOKENS), "--page-size", "16"),
        *("--kv-device-tokens", str(DEVICE_TOKENS), "--max-running-requests", "8"),
        *("--schedule-conservativeness", "0.05", *flags),
        model=model,
        env=env,
        imports_anew=imports_anew,
    )
