"""What tests and benchmarks share. ``test`` is on the path (pyproject.toml, or a line in a benchmark)."""
