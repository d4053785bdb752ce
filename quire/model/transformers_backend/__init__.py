"""Models that the transformers library computes, with quire's paged KV cache. Only this package imports the library, lazily."""
