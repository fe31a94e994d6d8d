"""What each field of a request may hold: tables by class of sglang, rules of their rows, and one check."""
