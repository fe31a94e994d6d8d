"""Memory tiers of KV, fastest first."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"
