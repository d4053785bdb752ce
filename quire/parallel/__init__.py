"""Tensor and pipeline parallelism without models: ranks, shards, communication, processes."""
