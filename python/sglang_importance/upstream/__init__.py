"""How we hold on to sglang: its symbols, its hooks, and launches that must stop."""
