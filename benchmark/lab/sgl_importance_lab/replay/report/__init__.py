"""Replays at the terminal: reading, progress, tables and pictures."""
