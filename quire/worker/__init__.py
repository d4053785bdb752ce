"""The runner: turns step plans into tensors, runs the model, samples."""
