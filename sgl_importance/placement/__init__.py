"""What an operator, a request or the past says of a prefix: pins, hints, the ledger, pre-warms."""
