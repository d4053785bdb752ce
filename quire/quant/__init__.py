"""Quantised weights: one neutral form, the checkpoint formats that are read into it, and quantising at load."""
