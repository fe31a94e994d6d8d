"""Why tokens of a prompt were not found: a memory of what the cache has held, an account of each prompt."""
