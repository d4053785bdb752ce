"""Heads that draft for a model: the layouts they are stored in, and what runs them."""
