"""Importance on the radix tree: facts and accumulated attention of its nodes, and the eviction order."""
