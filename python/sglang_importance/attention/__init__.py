"""Attention backends that emit page scores."""
