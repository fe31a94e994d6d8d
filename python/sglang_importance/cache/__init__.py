"""The radix cache that sglang builds under observe and importance, put together from its parts."""
