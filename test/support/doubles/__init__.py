"""Stand-ins for what a test cannot have, or must be able to break."""
