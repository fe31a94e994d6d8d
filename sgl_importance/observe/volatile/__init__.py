"""Volatile beginnings: text that changes with each request, in front of text that does not."""
