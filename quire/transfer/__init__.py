"""KV transfer between engines: the page server of a prefill engine, and the client of a decode engine."""
