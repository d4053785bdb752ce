"""Pure arithmetic about memory: what fits where. No torch."""
