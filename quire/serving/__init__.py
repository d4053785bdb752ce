"""The server: HTTP in one process, the engine in another, what joins them, and what keeps both alive."""
