"""How much memory a workload needs."""
