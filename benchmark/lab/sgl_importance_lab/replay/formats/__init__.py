"""Readers of trace files, one per format."""
