"""The Ollama API: bodies to conversations, events to lines of JSON."""
