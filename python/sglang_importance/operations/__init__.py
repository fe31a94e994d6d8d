"""What the HTTP process asks of a scheduler, and the answers."""
