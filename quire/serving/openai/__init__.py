"""The OpenAI API: bodies to plans, events to bytes, whole answers and streams by the same events."""
