"""Pages of KV in tiers, without tensors: what the device holds."""
