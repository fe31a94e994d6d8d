"""Pages in tiers on sglang: its KV pool on the host, page slots on the device, attention over both."""
