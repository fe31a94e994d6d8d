"""Stands in for soundfile, which sglang's routes for speech import: nothing of it is there."""
