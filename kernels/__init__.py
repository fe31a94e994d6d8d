"""Importance-emitting attention kernels and the definition that they are tested against."""
