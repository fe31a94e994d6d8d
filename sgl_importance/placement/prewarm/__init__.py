"""Pre-warm plans: the prefixes to bring in before a request asks for them."""
