"""Verified storage under HiCache: mounted as its ``dynamic`` backend, independent of any KV policy."""
