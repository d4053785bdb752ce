"""The KV data plane: the pool of paged key and value blocks."""
