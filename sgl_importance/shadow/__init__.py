"""What another eviction policy would have hit on live traffic: prefix caches without any KV in them."""
