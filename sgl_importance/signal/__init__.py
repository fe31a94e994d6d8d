"""Page scores of attention, accumulated on nodes."""
