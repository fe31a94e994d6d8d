"""Questions to recordings: each study states a claim, a value, its interval, and a verdict."""
