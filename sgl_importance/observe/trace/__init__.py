"""Recordings of a running server: requests, page scores and tree events, in a directory of segment files."""

from __future__ import annotations

from sgl_importance.observe.trace.reader import TraceError, TraceReader, open_trace

__all__ = ["TraceError", "TraceReader", "open_trace"]
