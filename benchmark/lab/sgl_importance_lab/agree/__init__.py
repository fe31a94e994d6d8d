"""Whether two servers answer a user's own prompts alike."""
