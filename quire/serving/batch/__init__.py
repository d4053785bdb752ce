"""Files and batches: what is kept of them, how lines are run, and what survives a restart."""
