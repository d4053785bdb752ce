"""Torch references: slow, readable, and the oracle of every other kernel."""
