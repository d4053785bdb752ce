"""Training of draft heads: what drafts ahead of a model is taught by that model's own outputs."""
