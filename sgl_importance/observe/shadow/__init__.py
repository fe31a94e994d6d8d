"""Shadow caches: hits that another eviction policy would have had on live traffic, without any KV."""
