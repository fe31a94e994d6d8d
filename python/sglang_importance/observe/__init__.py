"""What is told of a scheduler without changing it: recordings, and the shadow caches of observe."""
