"""The engine: scheduling, the step loop, and the Python API."""
