"""What the server tells of itself: Prometheus metrics, spans, and structured logs."""
