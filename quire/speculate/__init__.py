"""Speculative decoding: proposers draft tokens, and one verifier accepts those that plain decoding would have sampled."""
