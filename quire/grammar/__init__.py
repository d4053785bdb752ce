"""Constraints to grammars, bound to a vocabulary; what they allow next as masks of tokens."""
