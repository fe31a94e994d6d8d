"""Finds the amount of memory that a workload needs."""
