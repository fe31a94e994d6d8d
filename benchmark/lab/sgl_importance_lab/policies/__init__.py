"""Pure policies, one per file: they rank, they never move anything."""
