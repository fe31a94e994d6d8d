"""Which prefixes to bring in before anyone asks."""
