"""Errors, identifiers, logging and the registry: what every other package may use. No torch."""
