"""Model families, checkpoints, and the decoders that execute any ModelSpec."""
