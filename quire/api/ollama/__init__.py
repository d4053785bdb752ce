"""Bodies and answers of the Ollama API."""
