"""A chain of storage tiers below host memory: each page in exactly one, placed by marginal loss."""
