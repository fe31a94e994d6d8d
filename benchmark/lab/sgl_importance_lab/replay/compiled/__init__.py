"""Replays of one policy compiled as a whole: decision for decision what the driver of the server decides."""
