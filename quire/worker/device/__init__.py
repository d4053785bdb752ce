"""The runner of GPUs: the same plans and results as worker/runner.py, with the model, its cache and the sampler on a device."""
