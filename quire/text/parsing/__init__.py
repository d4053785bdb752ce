"""One incremental parser of tool calls and reasoning in model output; import its modules directly."""
