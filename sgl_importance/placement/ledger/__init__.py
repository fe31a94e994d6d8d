"""The ledger: facts of prefixes, reuse evidence and pins, kept in a file over restarts."""
