"""Where sglang's scheduler would end, or forget a request: what keeps it from that."""
