"""The Anthropic API: request bodies to conversations, events to content blocks, for whole answers and streams."""
