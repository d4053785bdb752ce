"""Frozen dataclasses and protocols that cross package borders. No torch."""
