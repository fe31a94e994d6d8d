"""Real components driven in this process, the way that a server drives them."""
