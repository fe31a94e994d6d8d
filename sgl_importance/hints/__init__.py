"""What a request may say of its own KV."""
