"""Models as data: families, checkpoints, and the one decoder that executes any spec."""
