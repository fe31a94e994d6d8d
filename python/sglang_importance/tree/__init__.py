"""The radix tree as importance sees it: facts on its nodes, what attention said, and which leaf goes next."""
