"""The executor of GPUs: steps of the model, its KV pool and the sampler on a device; their memory, CUDA graphs and building."""
