"""The Responses API: request bodies and stored items to conversations, events to items, and the store of responses."""
