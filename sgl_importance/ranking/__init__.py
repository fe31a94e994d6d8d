"""What the server loses by giving a node up: its eviction order, and which copies are worth their bytes."""
