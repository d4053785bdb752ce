"""Capacity planning before anything is bought or loaded: hardware, step times, memory, layouts, cost. No torch."""
