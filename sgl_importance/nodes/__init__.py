"""Facts of a radix-tree node, while it lives and as a ghost; page digests, which name prefixes."""
