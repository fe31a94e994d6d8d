"""Checks that a third party runs against its own producer or accumulator of ``docs/spec.md``."""
