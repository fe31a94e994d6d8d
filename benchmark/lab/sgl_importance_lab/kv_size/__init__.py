"""Says how many bytes a model's KV cache takes, from its config.json alone."""
