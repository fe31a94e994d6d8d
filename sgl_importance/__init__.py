"""Importance-guided KV cache tiering: pages, nodes, tiers and events. Never imports sglang."""
