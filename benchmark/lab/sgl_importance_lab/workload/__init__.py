"""Seeded requests in the language of the embedded model, each with its right answer where one exists."""
