"""Observation of a scheduler that changes nothing in it: recordings, and the shadow caches of observe."""
