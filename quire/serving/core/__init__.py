"""The neutral core of every generating API: a checked conversation becomes a plan, the engine's deltas become events."""
