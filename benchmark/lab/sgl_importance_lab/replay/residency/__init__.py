"""Recorded page lists through the policies of residency."""
