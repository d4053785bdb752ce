"""KV tiers: pages of full KV blocks outside of the pool, in host memory and on disk."""
