"""The embedded retrieval model and its tasks."""
