"""quire under cluster managers: the Ray Serve application."""
