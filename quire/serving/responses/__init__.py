"""The Responses API: bodies and stored items to conversations, events to items, and the store of responses."""
