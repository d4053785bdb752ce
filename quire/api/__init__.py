"""Wire types: what crosses HTTP, as the OpenAI and Anthropic clients state it; how bodies are decoded and refused."""
