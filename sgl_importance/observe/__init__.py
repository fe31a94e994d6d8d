"""What is told of a server without changing it: recordings, and shadow caches."""
