"""Compute kernels: `reference` holds the torch oracles."""
