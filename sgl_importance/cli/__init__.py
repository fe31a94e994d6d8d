"""Commands that talk to a running server. Never imports sglang."""
