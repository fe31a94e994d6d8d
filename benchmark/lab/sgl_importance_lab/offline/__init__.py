"""The real radix tree without a server: for replays, studies, tests and benchmarks."""
