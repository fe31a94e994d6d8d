"""Threads beside the one that serves: whoever hands them work never waits for it."""
