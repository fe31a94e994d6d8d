"""Trained language models for ``serve.sh``: fetched, converted from GGUF once, kept in ``.cache/models``."""
