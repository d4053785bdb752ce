"""The web page: its files, and the feed of its live view of the engine."""
