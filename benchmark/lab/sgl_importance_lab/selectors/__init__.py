"""Selectors that no server runs but for a comparison: what others published, and the bound of all."""
