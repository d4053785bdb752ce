"""Text to tokens and back: tokenizer, chat templates, incremental detokeniser, stop strings."""
