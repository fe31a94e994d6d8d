"""Hints: a request's statements about its own KV."""
