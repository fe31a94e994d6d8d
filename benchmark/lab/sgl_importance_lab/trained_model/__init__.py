"""A trained language model without a server: its arithmetic, and which of its layers find an answer."""
