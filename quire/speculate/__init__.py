"""Speculation: proposers draft tokens, one verifier takes from them what plain decoding would have sampled."""
