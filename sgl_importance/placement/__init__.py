"""What is kept, pinned and brought in ahead of requests: decided here, carried out by the server."""
