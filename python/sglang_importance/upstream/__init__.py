"""Our hold on sglang: the symbols we count on, the hooks we install, and launches that must stop."""
