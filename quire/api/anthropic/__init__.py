"""Wire types of the Anthropic API; import its modules directly."""
