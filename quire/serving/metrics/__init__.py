"""Prometheus metrics, traces and structured logs of the server."""
