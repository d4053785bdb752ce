"""The server: an HTTP process, an engine process, the connection between them, and their supervision."""
