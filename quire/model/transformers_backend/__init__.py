"""Models that the transformers library computes, over our paged KV cache. The library is imported here only, and lazily."""
