"""Traces in, hit-rate curves out; the same policy objects as the server."""
