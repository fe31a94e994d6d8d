"""A scheduler's counters, and their series on the server's own /metrics."""
