"""What was learnt and pinned, kept in a file over restarts."""
