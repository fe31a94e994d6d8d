"""Marginal loss of evicting a node, the eviction order that follows, and the admission of copies."""
