"""The Anthropic API: bodies to conversations, events to blocks, whole answers and streams by the same events."""
