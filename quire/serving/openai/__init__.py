"""The OpenAI API: request bodies to plans, events to bytes, for whole answers and streams."""
