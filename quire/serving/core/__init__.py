"""The neutral core of every generating API: it turns checked conversations into plans, and the engine's deltas into events."""
