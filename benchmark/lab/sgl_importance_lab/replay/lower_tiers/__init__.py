"""Replays over device, host and storage: three tiers, or a chain of any."""
