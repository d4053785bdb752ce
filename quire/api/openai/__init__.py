"""Wire types of the OpenAI API; import its modules directly."""
