"""What a scheduler counts, and its series on the server's own /metrics."""
