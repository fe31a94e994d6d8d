"""Trained language models for ``serve.sh``: fetched with pip, converted from GGUF once, kept in ``.cache/models``."""
