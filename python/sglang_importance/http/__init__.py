"""Routes that we add to sglang's own HTTP server, and what its process does with hints and pre-warms."""
