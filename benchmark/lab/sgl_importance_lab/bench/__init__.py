"""Standard benchmarks against any OpenAI-compatible server, made by the field's own harness."""
