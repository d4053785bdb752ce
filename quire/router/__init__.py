"""The router: one address in front of several OpenAI-compatible servers."""
